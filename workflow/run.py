"""Run the workflow of one params file and say where its report is.

    python workflow/run.py quickstart                       params/quickstart.yaml
    python workflow/run.py path/to/mine.yaml
    python workflow/run.py quickstart TARGET ...            only these files or rules of the workflow
    python workflow/run.py quickstart --profile workflow/profiles/slurm     on a cluster: docs/install.md

Everything else goes to Snakemake as it is (-n, --forcerun, --cores ...). Paths count from the project's root.

It dies with whoever started it, and its stages die with it: a killed run leaves nothing behind, and the next one goes on
where it ended. Only one at a time may work on a run; the lock is the kernel's, so a killed run leaves none. (On a
cluster a kill -9 leaves the jobs that are submitted; Ctrl-C cancels them.)
"""

import argparse
import fcntl
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import yaml
from snakemake.cli import main as snakemake

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import Run
from eagle3_lib.paths import ROOT, project_path
from eagle3_lib.process import die_with_parent

LOCAL = "workflow/profiles/local"


def arguments(words: list[str]) -> tuple[str, str, list[str]]:
    """(params file, profile, Snakemake's own words) of a command line.

    Raises:
        SystemExit: a profile without config.yaml or whose executor is not installed, or --config, by which the workflow
            learns its params file.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("name", nargs="?", default="quickstart", help="a name in params/, or a path that ends in .yaml")
    parser.add_argument("--profile", default=LOCAL, help=f"a folder with Snakemake's config.yaml (default: {LOCAL})")
    known, rest = parser.parse_known_args(words)
    config = project_path(known.profile) / "config.yaml"
    if not config.is_file():
        profiles = sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("workflow/profiles/*/config.yaml"))
        parser.error(f"--profile: found no config.yaml in {known.profile!r}, expected one of {', '.join(profiles)}")
    executor = yaml.safe_load(config.read_text()).get("executor", "local")
    if executor != "local" and not find_spec(f"snakemake_executor_plugin_{executor}"):
        parser.error(
            f"--profile: found no plugin for executor {executor!r} here; docs/install.md: EXTRA=cpu,{executor}"
        )
    if any(word.split("=")[0] in ("--config", "-C") for word in rest):
        parser.error("--config: not allowed here; parameters stand in the params file")
    params = known.name if known.name.endswith(".yaml") else f"params/{known.name}.yaml"
    return params, known.profile, rest


def main() -> None:
    die_with_parent()
    os.chdir(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    params, profile, rest = arguments(sys.argv[1:])
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
    # --config takes all words up to the next option, so an option that takes none stands last: targets may follow.
    ours = ["--config", f"params={params}", "-s", "workflow/Snakefile", "--profile", profile, "--nolock"]
    try:
        snakemake([*ours, *rest])
    except SystemExit as done:
        if done.code:
            print(f"The failed stage's executed notebook is in runs/{run.name}/notebooks/.", file=sys.stderr)
            raise
    if not rest:
        print(f"\nreport: {folder / 'pages' / 'index.html'}")


if __name__ == "__main__":
    main()
