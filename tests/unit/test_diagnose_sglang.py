"""The SGLang way of stage 00 from end to end, on answers and rounds that the real vLLM 0.32 gave (tests/stub_recorded.py)."""

import pytest
import stub_recorded
from stub_recorded import Recorded

from eagle3_lib.params import ServerParams
from eagle3_lib.stages import server
from eagle3_lib.verdict import diagnose

pytestmark = pytest.mark.slow


def judged(recorded, folder):
    values = {"out": str(folder / "out"), "name": "base", "max_prompts": 8, "max_tokens": 64, "states": False}
    with stub_recorded.serving(recorded) as url:
        values |= {"url": url, "prompts": str(stub_recorded.prompts(folder))}
        return server.run(ServerParams.check(values, "test"))


@pytest.mark.parametrize("joined, grade", [(1, "chunks"), (2, "histograms")])
def test_a_healthy_sglang(joined, grade, tmp_path):
    """A stream that joins rounds leaves the histograms, which clear the same engine."""
    card = judged(Recorded(joined=joined), tmp_path)
    assert (card.kind, card.grade, card.exit_code) == (diagnose.HEALTHY, grade, 0)
    assert card.engine == "sglang 0.5.16" and "sglang.launch_server" in card.next
    assert 1.8 < card.now["mean_length"] < 2.4
