"""Rooms: each imports only those below it, no two modules import each other, and notebooks import stages alone."""

import ast
import tomllib

import nbformat
import pytest
from importlinter.cli import EXIT_STATUS_ERROR, EXIT_STATUS_SUCCESS, lint_imports

from eagle3_lib.paths import ROOT

CONFIG = ROOT / "pyproject.toml"
ROOMS = sorted(path.parent for path in (ROOT / "eagle3_lib").glob("**/__init__.py"))
OPEN_TO_NOTEBOOKS = ("eagle3_lib.stages", "eagle3_lib.reports", "eagle3_lib.params")


def test_rooms_import_only_those_below_them_and_in_no_circle():
    assert lint_imports(str(CONFIG), cache_dir=None, no_cache=True) == EXIT_STATUS_SUCCESS


def test_an_import_upwards_would_be_seen(tmp_path):
    """The same contracts with two rooms exchanged are broken."""
    text = CONFIG.read_text()
    assert '    "stages",\n    "training",\n' in text
    wrong = tmp_path / "pyproject.toml"
    wrong.write_text(text.replace('    "stages",\n    "training",\n', '    "training",\n    "stages",\n'))
    assert lint_imports(str(wrong), cache_dir=None, no_cache=True) == EXIT_STATUS_ERROR


def test_every_room_is_a_layer():
    (rooms,) = (c for c in tomllib.loads(CONFIG.read_text())["tool"]["importlinter"]["contracts"] if c["id"] == "rooms")
    layers = {name.strip() for layer in rooms["layers"] for name in layer.split("|")}
    assert {path.name for path in ROOMS if path.parent.name == "eagle3_lib"} <= layers and rooms["exhaustive"]


@pytest.mark.parametrize("folder", ROOMS, ids=lambda path: path.name)
def test_each_folders_first_file_says_what_belongs_there(folder):
    tree = ast.parse((folder / "__init__.py").read_text())
    told = ast.get_docstring(tree)
    assert told and len(told.split()) >= 6
    code = [node for node in tree.body[1:] if not isinstance(node, ast.Import)]
    assert len(code) <= (1 if folder.name == "eagle3_lib" else 0), "a room's first file holds no code"


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_import_stages_params_and_reports_only(path):
    code = "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
    modules = [node.module for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = [module for module in modules if module.startswith("eagle3_lib")]
    assert ours and all(module.startswith(OPEN_TO_NOTEBOOKS) for module in ours), ours
