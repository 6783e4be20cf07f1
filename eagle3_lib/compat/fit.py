"""Does an engine fit this machine's GPUs: its compiled code, torch's CUDA and the driver, and the memory.

Collected before a server starts, so that a miss costs seconds and not a load: each comes with the command that mends it.
Checks are functions of facts; without a GPU only what tensor parallelism has to divide is checked.
"""

import functools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .. import manifest
from ..engines.base import Speculation, find_distribution, interpreter
from ..engines.inside import fit_probe
from ..engines.options import tensor_parallel
from ..engines.registry import ENGINES
from ..engines.spec import EngineSpec
from ..errors import Eagle3Error
from ..params import PreflightParams, Serving
from .findings import Finding
from .memory_plan import memory_needs

DIVISION_SOURCE = "vllm 0.32.0: config/model.py, model_executor/layers/vocab_parallel_embedding.py"


def collect(python: str = "") -> dict | None:
    """The facts: GPUs and driver as NVML tells them, torch and kernel packages as the engine's interpreter has them.

    Args:
        python: the interpreter that has the engine; "" is this one.
    Returns:
        {"gpus", "torch", "kernels"} (see :mod:`eagle3_lib.engines.inside.fit_probe`), None without a GPU.
    Raises:
        Eagle3Error: the interpreter does not run.
    """
    gpus = manifest.gpus()
    return {"gpus": gpus, **_probe(interpreter(python))} if gpus else None


@functools.cache
def _probe(python: str) -> dict:
    try:
        packages = [package for engine in ENGINES.values() for package in engine.spec.kernel_packages]
        command = [python, str(Path(fit_probe.__file__)), *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        raise Eagle3Error(f"engine_python: {python!r} does not run: {error}") from error
    return json.loads(done.stdout)


def code_findings(facts: dict) -> list[Finding]:
    """What is wrong between driver, torch, kernel packages and GPUs.

    Args:
        facts: of :func:`collect`.
    """
    torch, gpus = facts["torch"], facts["gpus"]
    if torch is None:
        return [_fails("torch", "the engine's interpreter has no torch", "install the engine there")]
    if torch["cuda"] is None:
        command = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        return [_fails("torch without CUDA", f"torch {torch['version']} is a build without CUDA", command)]
    found = list(_driver(torch, gpus[0]))
    for capability in sorted({gpu["compute_capability"] for gpu in gpus}):
        built = _torch_code(torch["architectures"])
        if not runs_on(capability, built):
            what = f"torch {torch['version']} has code for {_names(built)}, the GPU needs {capability}"
            found.append(_fails("torch has no code for this GPU", what, "pip install --upgrade torch"))
        for package in facts["kernels"]:
            found += _kernels(package, capability)
    return found


def _driver(torch: dict, gpu: dict) -> Iterator[Finding]:
    """A driver runs any CUDA of its own major version and of older ones (CUDA's minor version compatibility)."""
    driver, wanted = _pair(gpu["cuda"]), _pair(torch["cuda"])
    what = f"driver {gpu['driver']} is for CUDA {gpu['cuda']}, torch {torch['version']} for CUDA {torch['cuda']}"
    wheels = f"https://download.pytorch.org/whl/cu{driver[0]}{driver[1]}"
    remedy = f"a newer driver, or an engine whose torch is built for CUDA {driver[0]} (pip install torch --index-url {wheels})"
    if driver[0] < wanted[0]:
        yield _fails("driver older than CUDA", what, remedy)
    elif driver < wanted:
        why = "; machine code runs, PTX does not"
        yield Finding("note", "driver older than CUDA", what + why, "NVML; the engine's torch", remedy)


def _torch_code(architectures: list[str]) -> dict[str, list[str]]:
    """torch's names, such as sm_90 (machine code), sm_90a and compute_120 (PTX), as :func:`runs_on` wants them."""
    built: dict[str, list[str]] = {"sm": [], "ptx": []}
    for name in architectures:
        kind, number = name.split("_", 1)
        built["ptx" if kind == "compute" else "sm"].append(fit_probe.capability(int(number.rstrip("af"))))
    return built


def _kernels(package: dict, capability: str) -> Iterator[Finding]:
    name, files = package["package"], package["files"]
    missing = sorted(file for file, built in files.items() if not runs_on(capability, built))
    if not files or not missing:
        return
    built = {kind: sorted({c for f in missing for c in files[f][kind]}, key=_pair) for kind in ("sm", "ptx")}
    what = f"{name} {package['version']}: {', '.join(missing)}: code for {_names(built)}, the GPU needs {capability}"
    source = f"{name} {package['version']}, fat binaries of its libraries"
    maker = _maker(name)
    main = [file for file in files if Path(file).name.startswith(maker.main_libraries)] or list(files)
    if not set(main) <= set(missing):  # kernels of one architecture in a library of their own, beside the general one
        yield Finding(
            "note", f"some of {name} has no code for this GPU", what, source, "another backend, if it is asked for"
        )
    else:
        build = maker.kernel_build.format(arch=f"TORCH_CUDA_ARCH_LIST={capability}", version=package["version"])
        yield Finding("fails", f"{name} has no code for this GPU", what, source, build)


def _maker(package: str) -> EngineSpec:
    """The engine whose GPU code lies in a package."""
    return next(engine.spec for engine in ENGINES.values() if package in engine.spec.kernel_packages)


def runs_on(capability: str, built: dict[str, list[str]]) -> bool:
    """Whether code for some architectures runs on a GPU: machine code of its major version and no newer, or older PTX."""
    gpu = _pair(capability)
    machine = any(_pair(sm)[0] == gpu[0] and _pair(sm) <= gpu for sm in built["sm"])
    return machine or any(_pair(ptx) <= gpu for ptx in built["ptx"])


def memory_findings(needs: dict, gpus: list[dict], share: float, option: str) -> list[Finding]:
    """Whether weights, KV cache and drafter fit into what an engine takes of a GPU, and whether that is free.

    Args:
        needs: of :func:`memory_needs`.
        gpus: name, memory_gib, free_gib of each GPU.
        share: of a GPU's memory that the engine takes; option: what sets it.
    """
    if needs["gpus"] > len(gpus):
        what = f"found {len(gpus)} GPUs, tensor parallelism asks for {needs['gpus']}"
        return [_fails("too few GPUs", what, f"-tp {len(gpus)}")]
    found, need = [], needs["gpu_gib"]
    for index, gpu in enumerate(gpus[: needs["gpus"]]):
        takes = share * gpu["memory_gib"]
        parts = (
            f"weights {needs['weights_gib']}, drafter {needs['drafter_gib']}, KV cache of one context {needs['kv_gib']}"
        )
        if need > takes:
            what = f"GPU {index}: needs {need:.1f} GiB ({parts}), the engine takes {takes:.1f}"
            remedy = f"more GPUs (-tp {2 * needs['gpus']}), a shorter max_model_len, or a quantized target"
            found.append(_fails("does not fit the GPU", what, remedy))
        elif gpu["free_gib"] < takes:
            what = f"GPU {index}: the engine takes {takes:.1f} GiB ({share:.0%}), {gpu['free_gib']} are free"
            lower = int(100 * gpu["free_gib"] / gpu["memory_gib"]) / 100
            remedy = f"end what holds it (nvidia-smi), or engine_args: [{option}, '{lower:.2f}']"
            found.append(_fails("GPU memory is not free", what, remedy))
    return found


def division_findings(params: Serving | PreflightParams, folder: Path, speculation: Speculation) -> list[Finding]:
    """What of a target and its drafter tensor parallelism cannot divide: attention heads, KV heads, and the vocabulary in some engines."""
    ranks = tensor_parallel(params.engine_args)
    folders = {"target": folder} | ({"drafter": speculation.folder()} if speculation.drafter else {})
    padding, found = ENGINES[params.engine].spec.vocabulary_padding, []
    for who, place in folders.items():
        config = json.loads((place / "config.json").read_text())
        text = config | (config.get("text_config") or config.get("transformer_layer_config") or {})
        heads = text.get("num_attention_heads", ranks)
        kv_heads = text.get("num_key_value_heads") or heads  # more ranks than KV heads: each is held by several
        sizes = {"attention heads": heads, "KV heads": 0 if ranks % kv_heads == 0 else kv_heads}
        if padding:
            vocabulary = text.get("draft_vocab_size") or text.get("vocab_size", 0)
            sizes["tokens of its (draft) vocabulary"] = -(-vocabulary // padding) * padding
        for what, size in sizes.items():
            if size % ranks:
                told, remedy = (
                    f"{who}: {size} {what}, {ranks} ranks",
                    "a number of ranks that divides it (docs/gpus.md)",
                )
                found.append(Finding("fails", "cannot be divided", told, DIVISION_SOURCE, remedy))
    return found


def before_launch(params: Serving | PreflightParams, folder: Path, speculation: Speculation) -> list[Finding]:
    """All findings of what is about to be served; without a GPU, of what has to be divided alone."""
    return [*division_findings(params, folder, speculation), *_gpu_findings(params, folder, speculation)]


def _gpu_findings(params: Serving | PreflightParams, folder: Path, speculation: Speculation) -> list[Finding]:
    """[] without a GPU, and for an engine's CPU build."""
    if not manifest.gpus():
        return []
    spec = ENGINES[params.engine].spec
    try:
        build, _ = find_distribution(params.engine_python, spec.distributions)
    except Eagle3Error as error:
        return [
            _fails("no engine", str(error), "pip install it there, or name an interpreter that has it: engine_python")
        ]
    facts = None if build == spec.cpu_build else collect(params.engine_python)
    if facts is None:
        return []
    share, option = spec.memory_share, spec.memory_share_option
    if option in params.engine_args[:-1]:
        share = float(params.engine_args[params.engine_args.index(option) + 1])
    needs = memory_needs(params, folder, speculation)
    return [*code_findings(facts), *memory_findings(needs, facts["gpus"], share, option)]


def told(findings: list[Finding]) -> str:
    """Findings as lines, each with what mends it."""
    return "\n".join(f"{f.severity}: {f.rule}: {f.what}. Remedy: {f.remedy}" for f in findings)


def _fails(rule: str, what: str, remedy: str) -> Finding:
    return Finding("fails", rule, what, "NVML; the engine's interpreter", remedy)


def _pair(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _names(built: dict[str, list[str]]) -> str:
    return ", ".join([*built["sm"], *(f"PTX {version}" for version in built["ptx"])]) or "no GPU"
