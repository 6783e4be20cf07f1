"""Run the workflow of one params file and say where its report is.

    python workflow/run.py quickstart [snakemake options]        params/quickstart.yaml
    python workflow/run.py path/to/mine.yaml [snakemake options]

It dies with whoever started it, and its stages die with it: a killed run leaves nothing behind, and the next one goes on
where it ended. Only one at a time may work on a run; the lock is the kernel's, so a killed run leaves none.
"""

import fcntl
import os
import sys
from pathlib import Path

from snakemake.cli import main as snakemake

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import Run
from eagle3_lib.paths import ROOT
from eagle3_lib.process import die_with_parent


def main() -> None:
    die_with_parent()
    os.chdir(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    name, options = (sys.argv[1:2] or ["quickstart"])[0], sys.argv[2:]
    params = name if name.endswith(".yaml") else f"params/{name}.yaml"
    try:
        run = Run(params)
    except Eagle3Error as error:
        sys.exit(str(error))
    folder = ROOT / "runs" / run.name
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"run {run.name} is being executed by another process")
    common = ["-s", "workflow/Snakefile", "--profile", "workflow/profiles/local", "--nolock"]
    try:
        snakemake([*common, "--config", f"params={params}", *options])
    except SystemExit as done:
        if done.code:
            print(f"The failed stage's executed notebook is in runs/{run.name}/notebooks/.", file=sys.stderr)
            raise
    if not options:
        print(f"\nreport: {folder / 'pages' / 'index.html'}")


if __name__ == "__main__":
    main()
