"""Notebooks are thin, alike, and hold the parameters of their stage's model."""

import ast
import itertools

import nbformat
import papermill
import pytest
import yaml

from eagle3_lib.params import STAGES, Run, ServerParams
from eagle3_lib.paths import ROOT
from recipes.tiny_mla import TinyMlaParams

STAGE_NOTEBOOKS = sorted((ROOT / "notebooks").glob("0[1-9]*.ipynb"))
SERVER = ROOT / "notebooks" / "00_diagnose_server.ipynb"  # of no run: it stands alone
STAGE_OF = dict(zip([path.stem for path in STAGE_NOTEBOOKS], STAGES, strict=True))
NOTEBOOKS = [SERVER, *STAGE_NOTEBOOKS] + sorted((ROOT / "notebooks" / "recipes").glob("*.ipynb"))
MODEL_OF = {stem: STAGES[stage] for stem, stage in STAGE_OF.items()} | {
    "tiny_mla_target": TinyMlaParams,
    SERVER.stem: ServerParams,
}


def test_one_notebook_a_stage_in_order():
    assert [stem[:2] for stem in STAGE_OF] == [f"{i:02}" for i in range(1, 10)]
    for stem, stage in STAGE_OF.items():
        assert stage[:5] in stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_parameters_are_those_of_the_model(path):
    model = MODEL_OF[path.stem]
    inspected = papermill.inspect_notebook(str(path))
    assert set(inspected) == set(model.model_fields)
    assert all(entry["help"] for entry in inspected.values()), "each parameter has a comment"
    (cell,) = [c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])]
    assigned = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(cell.source).body}
    for name, field in model.model_fields.items():
        assert assigned[name] == field.default, name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_thin_and_clean(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3" and notebook.metadata.language_info.name == "python"
    assert notebook.cells[0].source.startswith(f"# {path.stem[:2]} " if path.stem[:2].isdecimal() else "# Recipe: ")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
            kinds = {type(node) for node in ast.walk(ast.parse(cell.source))}
            assert not kinds & {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef}
            # A parameters cell is as long as its model, which test_parameters_are_those_of_the_model sees to.
            assert len(cell.source.splitlines()) <= 25 or "parameters" in cell.metadata.get("tags", [])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_and_ends_as_a_reader_expects(path):
    cells = nbformat.read(path, 4).cells
    for word in ("**Inputs**", "**Outputs**", "**Run time**", "**Expect**"):
        assert word in cells[0].source, word
    assert [cell.metadata.get("tags") for cell in cells].index(["parameters"]) == 1
    assert f"{MODEL_OF[path.stem].__name__}.from_notebook(globals())" in cells[2].source
    assert cells[-1].source.startswith("## What you should see\n\n") and "\n\n**Next**: " in cells[-1].source
    for before, after in itertools.pairwise(STAGE_NOTEBOOKS):
        assert path != before or f"**Next**: {after.stem[:2]} " in cells[-1].source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_sentence_stands_before_each_step(path):
    cells = nbformat.read(path, 4).cells
    for before, cell in itertools.pairwise(cells[2:]):
        if cell.cell_type == "code":
            last = before.source.strip().splitlines()[-1]
            assert before.cell_type == "markdown" and not last.startswith("#"), f"before {cell.source[:60]!r}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_figure_has_a_caption_an_alternative_text_and_its_data(path):
    cells = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    calls = [node for source in cells for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in calls:
        if ast.unparse(call.func) == "plots.show":
            assert len(call.args) == 5, f"figure, caption, alternative text, place, rows: {ast.unparse(call)[:100]}"


@pytest.mark.parametrize("path", sorted((ROOT / "params").glob("*.yaml")), ids=lambda path: path.stem)
def test_params_files_resolve(path):
    run = Run(path)
    assert run.name == yaml.safe_load(path.read_text())["run"]
    for stage, model in STAGES.items():
        assert set(run.flat(stage)) == set(model.model_fields), "what papermill gets is what the notebook's cell holds"
