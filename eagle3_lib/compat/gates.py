"""Whether an engine lets a target run with EAGLE-3 at all, read from the engine's source tree without importing it.

So it needs no GPU and no working install, and works on the Python files of any unpacked wheel.
"""

import ast
import importlib.util
import subprocess
import zipfile
from functools import cache
from pathlib import Path

from ..errors import Eagle3Error
from .findings import Finding

INTERFACE = {"vllm": "SupportsEagle3", "sglang": "set_eagle3_layers_to_capture"}
MODELS = {"vllm": "model_executor/models", "sglang": "srt/models"}
TREE_PROBE = """
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print(spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else "")
"""


def source_tree(engine: str, python: str = "") -> Path | None:
    """The package folder of an engine installed in an interpreter ("" is this one), found without importing it.

    Returns:
        None where the engine is not installed there, or its files cannot be read from here.
    """
    if not python:
        spec = importlib.util.find_spec(engine)
        return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    done = subprocess.run([python, "-c", TREE_PROBE, engine], capture_output=True, text=True)
    told = done.stdout.strip()
    return Path(told) if told and (Path(told) / MODELS[engine]).is_dir() else None


def unpack(wheel: Path, folder: Path) -> Path:
    """The Python files of an engine's wheel, unpacked below ``folder``.

    Returns:
        the package folder inside it.
    Raises:
        Eagle3Error: the wheel is of another package, or damaged.
    """
    engine = wheel.name.split("-")[0].split("_")[0]
    if engine not in MODELS:
        raise Eagle3Error(f"{wheel.name}: expected a wheel of {' or '.join(MODELS)}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    except (zipfile.BadZipFile, OSError) as error:
        raise Eagle3Error(f"{wheel.name}: not a whole wheel: {error}") from error
    return folder / engine


def check(tree: Path, target_config: dict, label: str, latent_drafter: bool = False) -> list[Finding]:
    """Every place of an engine that keeps a target from running with EAGLE-3; "ok" when there is none.

    Args:
        tree: the engine's package folder, such as site-packages/vllm.
        target_config: the target's config.json.
        label: the engine and its version, for the findings.
        latent_drafter: the drafter has latent attention.
    Raises:
        Eagle3Error: the folder is no engine's package.
    """
    engine = tree.name
    if engine not in MODELS or not (tree / MODELS[engine]).is_dir():
        raise Eagle3Error(f"{tree.name}: expected the package folder of {' or '.join(MODELS)}")
    architecture = (target_config.get("architectures") or [""])[0]
    if engine == "sglang":
        found = _sglang_interface(tree, architecture, label)
    else:
        found = [
            *_vllm_whitelist(tree, target_config, label),
            *_vllm_interface(tree, architecture, target_config, label),
            *_vllm_image_token(tree, architecture, target_config, label),
        ]
        if latent_drafter:
            found += _vllm_drafter_class(tree, label)
    return found or [Finding("ok", "gates", f"{architecture} runs with EAGLE-3", label, "none needed")]


# --- vLLM -------------------------------------------------------------------------------------------------------------


def _vllm_whitelist(tree: Path, target_config: dict, label: str) -> list[Finding]:
    """0.16 and before: a list of substrings of the text model's type (config/speculative.py)."""
    path = "config/speculative.py"
    model_type = (target_config.get("text_config") or target_config).get("model_type", "")
    for node in ast.walk(_parsed(tree / path)):
        if isinstance(node, ast.Assign) and _names(node.targets) == ["eagle3_target_supported"]:
            allowed = ast.literal_eval(node.value)
            if not any(name in model_type for name in allowed):
                what = f"model_type {model_type} is not on the list of EAGLE-3 targets: {', '.join(allowed)}"
                return [Finding("fails", "gate_whitelist", what, f"{label}: {path}:{node.lineno}", "a later vLLM")]
    return []


def _vllm_interface(tree: Path, architecture: str, target_config: dict, label: str) -> list[Finding]:
    registry = _vllm_registry(tree)
    if architecture not in registry:
        what = f"{architecture} is not in the model registry"
        return [Finding("fails", "gate_architecture", what, f"{label}: {MODELS['vllm']}/registry.py", "a later vLLM")]
    text = ((target_config.get("text_config") or {}).get("architectures") or [""])[0]
    missing = []
    for name in dict.fromkeys((architecture, text)):
        if name in registry and not _inherits(tree / MODELS["vllm"], *registry[name], INTERFACE["vllm"]):
            module, cls = registry[name]
            missing.append(f"{cls} ({module}.py)")
    if not missing:
        return []
    what = f"{' and '.join(missing)} without the interface SupportsEagle3, so no boundaries are captured"
    source = f"{label}: {MODELS['vllm']}/{registry[architecture][0]}.py"
    return [Finding("fails", "gate_interface", what, source, "a later vLLM")]


def _vllm_image_token(tree: Path, architecture: str, target_config: dict, label: str) -> list[Finding]:
    """Multimodal targets: the proposer copies an image token id, from a field that depends on the architecture."""
    if architecture not in _vllm_registry(tree, "_MULTIMODAL_MODELS") or "image_token_index" in target_config:
        return []
    for path in ("v1/spec_decode/llm_base_proposer.py", "v1/spec_decode/eagle.py"):
        if not (tree / path).is_file():
            continue
        for node in ast.walk(_parsed(tree / path)):
            if isinstance(node, ast.FunctionDef) and (line := _image_token_default(node, architecture)):
                what = f"{architecture} has no image_token_index, which the proposer copies for it"
                return [Finding("fails", "gate_image_token", what, f"{label}: {path}:{line}", "a later vLLM")]
    return []


def _image_token_default(function: ast.FunctionDef, architecture: str) -> int | None:
    """The line that reads the target's image_token_index, unless the architecture has a branch of its own."""
    reads = [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and node.attr == "image_token_index"
        and ast.unparse(node.value) == "target_model.config"
    ]
    named = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
    return reads[0] if reads and architecture not in named else None


def _vllm_drafter_class(tree: Path, label: str) -> list[Finding]:
    """0.16: the proposer asserts the Llama drafter class."""
    path = "v1/spec_decode/eagle.py"
    for node in ast.walk(_parsed(tree / path)):
        if isinstance(node, ast.Assert) and ast.unparse(node.test).endswith("Eagle3LlamaForCausalLM)"):
            what = "the proposer asserts a Llama drafter; one with latent attention cannot run"
            return [Finding("fails", "gate_drafter_class", what, f"{label}: {path}:{node.lineno}", "a later vLLM")]
    return []


@cache
def _vllm_registry(tree: Path, only: str = "") -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class) of the registry's tables (those named ``_..._MODELS``)."""
    found: dict[str, tuple[str, str]] = {}
    for node in _parsed(tree / MODELS["vllm"] / "registry.py").body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        name = _names(node.targets if isinstance(node, ast.Assign) else [node.target])[0]
        if not name.endswith("_MODELS") or (only and name != only):
            continue
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                entry = [str(element.value) for element in value.elts if isinstance(element, ast.Constant)]
                if len(entry) >= 2:
                    found[str(key.value)] = (entry[0], entry[1])
    return found


# --- SGLang -----------------------------------------------------------------------------------------------------------


def _sglang_interface(tree: Path, architecture: str, label: str) -> list[Finding]:
    folder = tree / MODELS["sglang"]
    for path in sorted(folder.glob("*.py")):
        if architecture in path.read_text() and architecture in _entry_classes(path):
            if _inherits(folder, path.stem, architecture, INTERFACE["sglang"]):
                return []
            what = f"{architecture} has no {INTERFACE['sglang']}, so no boundaries are captured"
            return [Finding("fails", "gate_interface", what, f"{label}: srt/models/{path.name}", "a later SGLang")]
    what = f"{architecture} has no model file"
    return [Finding("fails", "gate_architecture", what, f"{label}: {MODELS['sglang']}", "a later SGLang")]


def _entry_classes(path: Path) -> list[str]:
    for node in _parsed(path).body:
        if isinstance(node, ast.Assign) and _names(node.targets) == ["EntryClass"]:
            return [name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)]
    return []


# --- source trees -----------------------------------------------------------------------------------------------------


def _inherits(folder: Path, module: str, cls: str, wanted: str) -> bool:
    """Whether a class names ``wanted`` as a base or has a method of that name, itself or through its bases."""
    path = folder / f"{module}.py"
    if not path.is_file():
        path = folder / module / "__init__.py"
    if not path.is_file():
        return False
    tree = _parsed(path)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    imported = {
        alias.asname or alias.name: (node.module.split(".")[-1], alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    if cls not in classes:
        return cls in imported and imported[cls] != (module, cls) and _inherits(folder, *imported[cls], wanted)
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in classes[cls].bases]
    methods = {node.name for node in classes[cls].body if isinstance(node, ast.FunctionDef)}
    if wanted in bases or wanted in methods:
        return True
    local = [base for base in bases if base != cls]
    return any(_inherits(folder, module, base, wanted) for base in local)


def _names(targets: list[ast.expr]) -> list[str]:
    return [target.id if isinstance(target, ast.Name) else "" for target in targets]


@cache
def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text())
    except (OSError, SyntaxError) as error:
        raise Eagle3Error(f"{path.name}: cannot be read as the engine's source: {error}") from error
