"""docs/extending.md followed to the letter: a toy fault, a toy version of vLLM and a toy engine from its code blocks."""

import copy
import importlib.metadata
import json
import re
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
import yaml
from safetensors.torch import save_file
from test_checkpoint_formats import BASE, TARGET, drafter_of, stored
from test_registry import offered

from eagle3_lib.compat import audit, launch, rules
from eagle3_lib.drafter import checkpoint
from eagle3_lib.engines import base, running, serving
from eagle3_lib.engines.registry import ENGINES
from eagle3_lib.engines.spec import Engine
from eagle3_lib.engines.told import Card
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import BenchmarkParams
from eagle3_lib.paths import ROOT
from eagle3_lib.verdict import changes, faults, hypotheses, replay

PAGE = (ROOT / "docs/extending.md").read_text()


def blocks(heading: str) -> list[str]:
    """The code blocks of a section."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```(?:python|yaml)\n(.*?)```", section, re.DOTALL)


def run(code: str) -> dict:
    names: dict = {}
    exec(code, names)
    return names


@pytest.mark.slow
def test_a_fault(recorded, target, monkeypatch):
    """In the catalogue it is a hypothesis, and the only one that reproduces an engine that has it."""
    (block,) = blocks("A fault")
    fault = run(block)["FAULT"]
    monkeypatch.setattr(faults, "CATALOGUE", (*faults.CATALOGUE, fault))
    monkeypatch.setitem(faults.FAULTS, fault.name, fault)
    assert f"### {fault.name}" in faults.markdown()
    setups = hypotheses.hypotheses(recorded.drafter, changes.TargetParts.of(target))
    assert fault.name in setups
    texts, steps = recorded.few, recorded.steps
    slots = replay.all_slots(texts)
    engine = replay.own_rounds(replay.counts_at(setups[fault.name], texts, slots, steps), texts)
    tried = {name: setups[name] for name in (changes.HEALTHY, "low boundary dropped", fault.name)}
    counts = hypotheses.replay_all(tried, texts, engine, steps)
    assert [name for name in tried if counts[name] == engine] == [fault.name]


def test_an_engine_version(tmp_path, monkeypatch):
    """The audit answers for it, and its own counts are read by its own names."""
    written, code = blocks("An engine version")
    told, known = yaml.safe_load(written), copy.deepcopy(rules.rules())
    (version,) = told["versions"]["vllm"]
    known["versions"]["vllm"].append(version)
    known["rules"] += told["rules"]
    monkeypatch.setattr(rules, "rules", lambda: known)
    assert rules.neighbours("vllm", version) == (version, version)
    config = BASE.with_(norm_before_residual=True)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.to_config_json(config, torch.float32)))
    save_file(stored(drafter_of(config), "midlayer."), tmp_path / "model.safetensors")
    found = {v: {f.rule: f for f in audit.check(tmp_path, TARGET, "vllm", v)} for v in ("0.33.0", version)}
    (rule,) = told["rules"]
    assert rule["id"] not in found["0.33.0"]
    assert found[version][rule["id"]].severity == "wrong" and "vllm 0.34.0: " in found[version][rule["id"]].source
    assert found[version]["boundaries"].severity == "ok"

    names = run(code)
    vllm = ENGINES["vllm"].spec
    new = replace(vllm, read=names["READ"], definitions=(*vllm.definitions, names["DEFINITION"]))
    metrics = {"rounds": 4, "accepted_drafts": 5, "drafts": 11, "rounds_by_accepted": [1, 2, 0, 1]}
    assert new.is_read(version) and not vllm.is_read(version)
    assert new.definitions_in(version).totals_in(metrics) == {"rounds": 4, "accepted": 5, "drafted": 11}
    assert new.definitions_in("0.33.0") == vllm.definitions_in("0.33.0")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The package of the page in a temporary folder, registered."""
    spec, server, told, line = blocks("An engine")
    package = tmp_path / "toy"
    package.mkdir()
    for name, code in (("__init__", ""), ("spec", spec), ("server", server), ("told", told)):
        (package / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(ROOT)
    engine = run(line)["ENGINE"]
    monkeypatch.setitem(ENGINES, "toy", engine)
    yield engine
    for name in ("toy", "toy.spec", "toy.server", "toy.told"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_an_engine(toy, tmp_path):
    """The library serves it, asks it for one completion, and ends it."""
    assert isinstance(toy, Engine) and offered(toy.server)
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"num_attention_heads": 4, "vocab_size": 60}))
    params = BenchmarkParams().model_copy(update={"engine": "toy", "start_timeout_s": 60})
    with launch.serve(params, target, tmp_path / "server.log") as server:
        assert (server.engine, server.version) == ("toy", importlib.metadata.version("uvicorn"))
        answer = serving.complete(server, [1, 2], 10)
        assert answer.output_ids == list(range(10)) and answer.totals is None
        assert serving.counters(server) is None and serving.decode(server, [1], 10, batch=2) == 20
        processes = [psutil.Process(server.group), *psutil.Process(server.group).children(recursive=True)]
    time.sleep(0.2)
    assert not [process for process in processes if process.is_running() and process.status() != "zombie"]
    with (
        pytest.raises(Eagle3Error, match="the toy does not speculate"),
        launch.serve(params, target, tmp_path / "log", base.Speculation("ngram")),
    ):
        pass


def test_a_running_server_of_that_engine(toy):
    server = base.Server("http://127.0.0.1:9", "one", "server", "")
    assert toy.running.recognised(server, "vllm") is None
    version = toy.running.recognised(server, "toy")
    told = toy.running.told(server, Card("one"), ["one"])
    assert (version, told.engine, told.method, told.positions) == ("", "toy", "plain", 0)
    with pytest.raises(Eagle3Error, match="does not speculate"):
        running.refuse(told, 0)


def test_the_page_names_only_what_there_is():
    for path in re.findall(r"`((?:eagle3_lib|tests|benchmarks)/[\w./]+\.(?:py|yaml))`", PAGE):
        assert (ROOT / path).is_file(), path
