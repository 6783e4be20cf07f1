"""Whether running servers serve the target, before stage 03 asks them; keys, headers and TLS of the servers that it asks."""

import json
import shutil
import subprocess

import pytest
import stub_recorded
import stub_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from stub_recorded import QUESTIONS, Recorded
from stub_running import in_thread

from eagle3_lib.compat import chat_template
from eagle3_lib.engines.access import Access
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import GenerateParams
from eagle3_lib.stages import generate, served
from eagle3_lib.targets import targets
from eagle3_lib.targets.answers import read_answers

KEY, TOKEN = "sk-secret-0123456789", "team-secret-9876543210"


def params_for(folder, servers, target=targets.SMOLLM2_FOLDER, **more):
    return GenerateParams(
        out=str(folder / "out"), prompts=str(stub_recorded.prompts(folder)), servers=servers, target=str(target), **more
    )


@pytest.fixture
def loads(monkeypatch):
    """Counts how often the target is loaded."""
    done, load = [], targets.load
    monkeypatch.setattr(targets, "load", lambda *words: done.append(words) or load(*words))
    return done


@pytest.mark.slow
def test_servers_of_the_target_are_checked_once_and_the_target_is_loaded_once(tmp_path, target_folder, loads):
    one, two = Recorded(), Recorded()
    with stub_recorded.serving(one) as first, stub_recorded.serving(two) as second:
        params = params_for(tmp_path, [first, second])
        summary = generate.run(params)
        assert [(row["server"], row["tokens"], row["differ"], row["remark"]) for row in summary["served_models"]] == [
            (first, 32, 0, ""),
            (second, 32, 0, ""),
        ]
        assert summary["samples"] == len(QUESTIONS) == 12 and len(loads) == 1
        assert json.loads((tmp_path / "out" / "manifest.json").read_text())["notes"]["served_models"][0]["tokens"] == 32
        log = tmp_path / "out" / "log.jsonl"
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:5]))  # killed on the way
        asked = one.asked, two.asked
        again = generate.run(params)
        assert again["asked_now"] == 7 and again["served_models"] == summary["served_models"]
        assert (one.asked, two.asked) == asked and len(loads) == 1
        generate.run(params_for(tmp_path, [first, second], max_tokens=50))  # other answers: a new start
        assert len(loads) == 2 and one.asked > asked[0]


@pytest.mark.slow
def test_a_server_of_another_model_is_refused_before_the_first_request(tmp_path, target_folder):
    other = Recorded(ids=lambda ids: [(token + 1) % 49152 for token in ids])
    with stub_recorded.serving(Recorded()) as right, stub_recorded.serving(other) as wrong:
        with pytest.raises(Eagle3Error) as error:
            generate.run(params_for(tmp_path, [right, wrong]))
    said = str(error.value)
    assert said.count("\n") == 0 and f"{wrong} serves " in said and right not in said
    assert " of 32 greedy tokens that the server gave are not those of models/SmolLM2-135M-Instruct" in said
    assert 16 < int(said.partition(" of 32 ")[0].rpartition(" ")[2]) <= 32
    assert not (tmp_path / "out" / "log.jsonl").exists() and other.chats == 1  # the question for token ids alone


@pytest.mark.slow
def test_a_few_tokens_that_are_not_the_targets_are_told(tmp_path, target_folder, capsys):
    """The last one of each answer to the check is another; nobody can say from that which model is served."""
    odd = Recorded(ids=lambda ids: [*ids[:-1], (ids[-1] + 1) % 49152])
    with stub_recorded.serving(odd) as url:
        (row,) = generate.run(params_for(tmp_path, [url]))["served_models"]
    said = f"{url}: 2 of 32 greedy tokens of the served model are not the target's"
    assert (row["tokens"], row["differ"], row["remark"]) == (32, 2, said)
    assert f"note: {said}" in capsys.readouterr().err


def without_weights(folder, target_folder):
    """The target's folder as it is where only the tokenizer was fetched."""
    folder.mkdir()
    for file in target_folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return folder


@pytest.mark.slow
def test_a_check_that_cannot_be_made_is_told_and_made_up_for(tmp_path, target_folder, capsys):
    target, server = without_weights(tmp_path / "target", target_folder), Recorded()
    with stub_recorded.serving(server) as url:
        params = params_for(tmp_path, [url], target)
        (row,) = generate.run(params)["served_models"]
        said = f"{url} was not checked to serve {target}: the weights of {target} are not on this machine"
        assert (row["tokens"], row["remark"]) == (0, said) and f"note: {said}" in capsys.readouterr().err
        assert len(read_answers(tmp_path / "out")) == 12
        log, asked = tmp_path / "out" / "log.jsonl", server.asked
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:5]))
        assert generate.run(params)["asked_now"] == 7 and server.asked > asked  # tried again


def test_a_server_that_is_no_known_engine_is_not_checked(tmp_path, target_folder):
    with stub_server.running("--fail", 0) as url:
        (row,) = generate.run(params_for(tmp_path, [url]))["served_models"]
    assert row["tokens"] == 0 and "is none of vllm, sglang" in row["remark"]


def test_weights_that_do_not_fit_are_not_loaded(monkeypatch, target_folder):
    class Memory:
        available = 100 * 2**20

    monkeypatch.setattr(served.psutil, "virtual_memory", Memory)
    with pytest.raises(Eagle3Error, match=r"take 0\.\d GiB in float32, and 0\.1 GiB of memory are free"):
        served.local_folder(targets.SMOLLM2, "float32")
    with pytest.raises(Eagle3Error, match="the weights of nobody/nothing are not on this machine"):
        served.local_folder("nobody/nothing", "float32")


# ------------------------------------------------------------------------------------------------ keys, headers, TLS


def guarded(seen: list) -> Starlette:
    """A server that needs a key and a header, and repeats what it was sent when it refuses."""

    async def answer(request: Request) -> Response:
        seen.append(dict(request.headers))
        sent = f"{request.headers.get('authorization')} {request.headers.get('x-team')}"
        if sent != f"Bearer {KEY} {TOKEN}":
            return JSONResponse({"error": f"Unauthorized: {sent}"}, 401)
        if request.url.path == "/v1/models":
            return JSONResponse({"data": [{"id": "stub"}]})
        if request.url.path == "/tokenize":
            return JSONResponse({"tokens": [1, 2, 3]})
        if request.url.path != "/v1/chat/completions":
            return JSONResponse({"error": f"Not Found; you sent {sent}"}, 404)
        body = await request.json()
        if body["messages"][-1]["content"] == QUESTIONS[0]:
            return JSONResponse({"error": f"refused; you sent {sent}"}, 400)
        choice = {"message": {"content": "x"}, "finish_reason": "stop", "token_ids": [5, 2]}
        return JSONResponse({"choices": [choice], "prompt_token_ids": [1, 2]})

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])


NAMED = {"api_key_env": "STUB_KEY", "headers_env": {"X-Team": "STUB_TOKEN"}}


@pytest.fixture
def secrets(monkeypatch):
    monkeypatch.setenv("STUB_KEY", KEY)
    monkeypatch.setenv("STUB_TOKEN", TOKEN)


def test_a_key_reaches_the_server_and_stands_nowhere_else(tmp_path, target_folder, secrets, monkeypatch, capsys):
    seen = []
    with in_thread(guarded(seen)) as place:
        url = f"http://{place}"
        summary = generate.run(params_for(tmp_path, [url], **NAMED))
        assert summary["samples"] == 11 and summary["refused"] == 1
        assert {(sent["authorization"], sent["x-team"]) for sent in seen} == {(f"Bearer {KEY}", TOKEN)}
        (refused,) = [line for line in (tmp_path / "out" / "log.jsonl").open() if '"refused":"4' in line]
        assert "refused; you sent Bearer *** ***" in refused
        manifest = (tmp_path / "out" / "manifest.json").read_text()
        monkeypatch.setenv("STUB_KEY", KEY + "-old")
        with pytest.raises(Eagle3Error, match="does not answer as an OpenAI-compatible server: 401") as error:
            generate.run(params_for(tmp_path, [url], max_tokens=9, **NAMED))
    shown = str(error.value) + repr(error.value.__cause__) + "".join(capsys.readouterr())
    assert json.loads(manifest)["params"]["api_key_env"] == "STUB_KEY"
    shown += manifest + "".join(
        path.read_text(errors="replace") for path in (tmp_path / "out").rglob("*") if path.is_file()
    )
    assert KEY not in shown and TOKEN not in shown


def test_an_address_with_a_password_is_refused_and_not_repeated(tmp_path, target_folder):
    with pytest.raises(Eagle3Error, match="url: found a user name") as error:
        generate.run(params_for(tmp_path, ["http://me:pass-word@127.0.0.1:9"]))
    assert "pass-word" not in str(error.value)


def test_the_route_tokenize_is_asked_with_the_key(secrets):
    seen, conversation = [], [[{"role": "user", "content": "Hi"}]]
    with in_thread(guarded(seen)) as place:
        reached = Access(f"http://{place}/v1", KEY, {"X-Team": TOKEN})
        assert chat_template.served_ids(reached, "stub", conversation) == [[1, 2, 3]]
        with pytest.raises(Eagle3Error, match="/tokenize: found no token ids of a conversation: .*401"):
            chat_template.served_ids(Access(f"http://{place}"), "stub", conversation)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("openssl"), reason="makes its certificate with openssl")
def test_tls_of_the_servers_that_generate(tmp_path, target_folder, secrets):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=stub -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(words.split(), check=True, capture_output=True)
    with in_thread(guarded([]), ssl_keyfile=key, ssl_certfile=certificate) as place:
        servers = [f"https://{place}"]
        with pytest.raises(Eagle3Error, match="CERTIFICATE_VERIFY_FAILED"):
            generate.run(params_for(tmp_path, servers, tries=1, **NAMED))
        trusted = generate.run(params_for(tmp_path, servers, ca_file=str(certificate), **NAMED))
        unchecked = generate.run(params_for(tmp_path, servers, verify_tls=False, **NAMED))
    assert (trusted["asked_now"], unchecked["asked_now"]) == (
        12,
        1,
    )  # the refused one is asked again, the others are kept
