"""What keeps a target from running with EAGLE-3, release by release, read in the Python files of the engines' wheels.

Downloads each wheel from the package index, unpacks its Python files into a temporary folder, parses them, and keeps
only the findings. Writes results/gates_of_wheels.json.

    python benchmarks/gates_of_wheels.py
"""

import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from eagle3_lib.compat import gates, rules
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.files import write_json
from eagle3_lib.paths import ROOT
from eagle3_lib.targets.known_configs import known_config

TARGETS = {
    "Kimi-K2.5": known_config("Kimi-K2.5"),
    "Llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_34_x86_64", "any")


def unpacked(engine: str, version: str, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(work)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    done = subprocess.run(
        [*command, "--python-version", "3.12", f"{engine}=={version}"], capture_output=True, text=True
    )
    wheels = list(work.glob(f"{engine}-*.whl"))
    if done.returncode or not wheels:
        raise Eagle3Error(f"pip could not download {engine}=={version}: {done.stderr.strip()[-300:]}")
    return gates.unpack(wheels[0], work / "tree")


def main() -> None:
    rows = []
    for engine, versions in rules.rules()["versions"].items():
        for version in versions:
            with TemporaryDirectory() as work:
                tree = unpacked(engine, version, Path(work))
                for target, config in TARGETS.items():
                    findings = gates.check(tree, config, f"{engine} {version}")
                    row = {"engine": engine, "version": version, "target": target}
                    rows.append(row | {"findings": [asdict(finding) for finding in findings]})
            print(engine, version, [f["rule"] for f in rows[-3]["findings"]], flush=True)
    result = {"command": "python benchmarks/gates_of_wheels.py", "date": time.strftime("%Y-%m-%d", time.gmtime())}
    write_json(ROOT / "benchmarks/results/gates_of_wheels.json", result | {"rows": rows})


if __name__ == "__main__":
    main()
