"""The registry of engines, and the places outside of it that name engines."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import get_args

import pytest

from eagle3_lib import cli, manifest
from eagle3_lib.compat import rules
from eagle3_lib.engines import options
from eagle3_lib.engines.protocol import EngineServer
from eagle3_lib.engines.registry import ENGINES
from eagle3_lib.params import EngineKind
from eagle3_lib.reports import publish


def offered(module: ModuleType) -> bool:
    """Whether a module has every function of the protocol, with its parameters in the same order."""
    for name, function in inspect.getmembers(EngineServer, inspect.isfunction):
        if not name.startswith("_"):
            expected = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
            assert list(inspect.signature(getattr(module, name)).parameters) == expected, name
    return True


def choices(command: Callable) -> set[str]:
    """The values that a command's option ``engine`` takes."""
    return set(get_args(get_args(inspect.signature(command).parameters["engine"].annotation)[0]))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_offers_the_protocol(name):
    assert ENGINES[name].spec.name == name and offered(ENGINES[name].server)


def test_places_that_name_engines_name_those_of_the_registry():
    assert set(get_args(EngineKind)) == set(ENGINES) == set(rules.rules()["versions"])
    assert choices(cli.audit) == set(ENGINES) and choices(cli.export) == {*ENGINES, "speculators"}
    distributions = {name for engine in ENGINES.values() for name in engine.spec.distributions}
    assert distributions <= set(manifest.PACKAGES) and distributions <= set(publish.ENGINES)


@pytest.mark.parametrize("name", ENGINES)
def test_definitions_are_in_the_order_of_versions(name):
    spec = ENGINES[name].spec
    since = [row.since for row in spec.definitions]
    assert since == sorted(since) and spec.cpu_build in ("", *spec.distributions)
    assert all(spec.is_read(version) for version in rules.rules()["versions"][name])


def test_what_is_known_of_engines_needs_no_client_of_theirs():
    """Stages that only read results and the plugin inside vLLM ask the registry."""
    code = "import json, sys; import eagle3_lib.engines.options, eagle3_lib.engines.meaning; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"httpx", "openai", "torch", "psutil"} & set(json.loads(done.stdout))


def test_the_budget_of_a_prefill_step_is_read_off_the_engines_words():
    assert options.prefill_chunk(["--max-num-batched-tokens", "2048"]) == 2048
    assert options.prefill_chunk(["--chunked-prefill-size=512"]) == 512
    assert options.prefill_chunk(["--chunked-prefill-size", "-1"]) is None and options.prefill_chunk([]) is None
