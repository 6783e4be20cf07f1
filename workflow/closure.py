"""The files of the project that a rule depends on: the modules that its notebook imports, and what those import and read.

The import graph is grimp's, built once in each process (0.1 s). What no import shows is stated here, in three tables.
"""

import ast
import functools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import grimp

from eagle3_lib.compat.vllm_plugin import SWITCH
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.paths import ROOT, project_path, short_path

PACKAGE = "eagle3_lib"
DRAWING = f"{PACKAGE}.reports"
NAMED = re.compile(rf"\b{PACKAGE}(?:\.\w+)+")

# module -> modules that it starts by name, in another process or interpreter.
STARTED = {
    "eagle3_lib.engines.base": ["eagle3_lib.process"],
    "eagle3_lib.features.backends": ["eagle3_lib.process", "eagle3_lib.engines.inside.vllm_tap"],
    "eagle3_lib.compat.fit": ["eagle3_lib.engines.inside.fit_probe"],
    "eagle3_lib.compat.vllm_plugin": ["eagle3_lib.engines.inside.vllm_capture"],
}
# The same, where an environment variable is 1: vLLM loads its plugin in each process, and it then does something.
STARTED_IF = {SWITCH: {"eagle3_lib.engines.vllm": ["eagle3_lib.compat.vllm_plugin"]}}
# module -> patterns of the data files that it reads, in the folder where the module lies.
DATA = {
    "eagle3_lib.compat.rules": ["audit_rules.yaml"],
    "eagle3_lib.targets.known_configs": ["configs/*.json"],
    "eagle3_lib.reports.card": ["card.html.j2"],
    "eagle3_lib.reports.plots": ["eagle3.mplstyle"],
    "eagle3_lib.reports.runs_index": ["template/**/*"],
}


@functools.cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, cache_dir=None)


def of_notebook(path: str, words: Iterable[str] = (), figures: bool = False) -> list[str]:
    """The files that an executed notebook's results depend on, beside itself.

    Args:
        path: the notebook, relative to the project root.
        words: texts that may name further modules, such as the arguments of an engine that loads one.
        figures: also what draws its figures and tables. Stages that serve or train do not run again for the look of a
            figure.
    Returns:
        paths relative to the project root, sorted.
    Raises:
        Eagle3Error: the notebook imports a module of the project that does not exist.
    """
    cells = json.loads(project_path(path).read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imported = [name for name in _imported(source, path) if figures or not name.startswith(DRAWING)]
    return of_modules([*imported, *named_in(words)])


def of_modules(modules: Iterable[str]) -> list[str]:
    """The files of some modules, of all that they import or start, directly or not, and the data that those read.

    Returns:
        paths relative to the project root, sorted.
    """
    found: set[str] = set()
    todo = set(modules)
    while todo:
        module = todo.pop()
        if module in found:
            continue
        found.add(module)
        todo |= graph().find_modules_directly_imported_by(module)
        todo |= set(_started_by(module))
        parent = module.rpartition(".")[0]
        if parent:
            todo.add(parent)
    paths = {file_of(module) for module in found}
    paths |= {path for module in found for path in data_of(module)}
    return sorted(short_path(path) for path in paths)


def file_of(module: str) -> Path:
    """The source file of a module of the project."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def data_of(module: str) -> list[Path]:
    """The data files that a module reads beside itself."""
    folder = file_of(module).parent
    found = [path for pattern in DATA.get(module, []) for path in folder.glob(pattern)]
    return [path for path in found if path.is_file()]


def named_in(words: Iterable[str]) -> list[str]:
    """The modules of the project that some texts name, alone or with something of theirs behind a point."""
    names = [name for word in words for name in NAMED.findall(word)]
    return [module for name in names if (module := _module_of(name)) != PACKAGE]


def _started_by(module: str) -> list[str]:
    started = list(STARTED.get(module, []))
    for variable, table in STARTED_IF.items():
        if os.environ.get(variable) == "1":
            started += table.get(module, [])
    return started


def _module_of(name: str) -> str:
    """The longest beginning of a dotted name that is a module."""
    while name not in graph().modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def _imported(source: str, where: str) -> list[str]:
    """The modules of the project that a notebook's code imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] != PACKAGE:
                continue
            module = _module_of(name)
            if module == PACKAGE and name != PACKAGE:
                raise Eagle3Error(f"{where}: found an import of {name}, expected a module of {PACKAGE}")
            found.append(module)
    return found
