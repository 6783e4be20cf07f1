"""Servers that run already: recorded answers of real ones (tests/data/servers/README.md), refusals, and one clear error each."""

import dataclasses
import json
import logging
import pickle
import shutil
import socket
import subprocess
import time
import traceback

import pytest
import stub_running
from stub_running import record, serving

from eagle3_lib.engines import base, running
from eagle3_lib.engines.access import Access
from eagle3_lib.engines.vllm import told as vllm_told
from eagle3_lib.errors import Eagle3Error

KEY = "sk-secret-0123456789"
DETAILED, NO_ROUNDS = "vllm/0.32.0_eagle3_detailed", "vllm/0.32.0_eagle3_no_rounds"
INFO = "/server_info?config_format=json"


def found(told, model="", **options):
    with serving(told, **options) as url:
        return running.find(Access(url), model)


# ------------------------------------------------------------------------------------------------------------------- vLLM


def test_a_vllm_in_dev_mode_tells_all_but_the_cache():
    server, told = found(record(DETAILED))
    assert (server.engine, server.version, server.model) == ("vllm", "0.32.0", "target")
    assert server.tells_rounds and told.tells_rounds
    assert told.target == "models/SmolLM2-135M-Instruct" and told.drafter == "drafters/smollm2-135m-eagle3"
    assert (told.method, told.positions, told.positions_from) == ("eagle3", 4, "/server_info")
    assert told.options == {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}
    assert told.engine_args == ["--max-num-batched-tokens", "2048", "--tensor-parallel-size", "1"]
    assert (told.dtype, told.max_model_len, told.prefix_caching, told.quantization) == ("float32", 512, True, "")
    assert (told.data_parallel, told.tensor_parallel, told.prefill_chunk, told.stream_interval) == (1, 1, 2048, 1)
    assert told.has_counters and told.takes_salt and told.tells_cached is None
    assert (told.asked_steps, told.asked_rounds) == (10, 10)
    assert told.untold == [
        "Prompt tokens from the prefix cache are not told; --enable-prompt-tokens-details would tell them."
    ]
    for temperature in (0, 1):
        running.refuse(told, temperature)


def test_a_vllm_as_most_are_tells_k_by_its_counters():
    server, told = found(record(NO_ROUNDS, without=(INFO,)) | {"rounds": 10})
    assert (told.positions, told.positions_from) == (4, "position labels of /metrics")
    assert told.tells_rounds is False and not server.tells_rounds and told.has_counters
    assert (told.method, told.drafter, told.dtype, told.quantization) == ("", "", "", None)
    assert told.target == "models/SmolLM2-135M-Instruct" and told.prefix_caching is True and told.data_parallel == 1
    text = " ".join(told.untold)
    assert "method of speculation" in text and "synthetic" in text and text.count("VLLM_SERVER_DEV_MODE=1") == 3
    assert (told.asked_steps, told.asked_rounds) == (10, 10) and "skips steps" not in text
    running.refuse(told, 0)


@pytest.mark.parametrize("name, positions", [("eagle3", 4), ("ngram", 4), ("plain", 0)])
def test_a_vllm_on_a_gpu(name, positions, monkeypatch):
    monkeypatch.setattr(vllm_told, "COUNTERS_LAG_S", 0)
    told = record(f"vllm/0.23.0_{name}") | {key: record(NO_ROUNDS)[key] for key in ("whole", "streamed")}
    server, told = found(told | {"rounds": 4 if name == "ngram" else 10})
    skips = "/metrics counted 4 rounds for a short answer of 10 steps: its drafter skips steps"
    assert (skips in " ".join(told.untold)) == (name == "ngram")
    assert (server.version, told.positions, told.data_parallel) == ("0.23.0", positions, 1)
    assert told.method == ("plain" if name == "plain" else "")
    if name == "plain":
        with pytest.raises(Eagle3Error, match="does not speculate .no speculation counters in /metrics"):
            running.refuse(told, 0)


def test_k_of_a_vllm_without_counters_comes_from_an_answer():
    _, told = found(record(DETAILED, without=(INFO, "/metrics")))
    assert (told.positions, told.positions_from) == (4, "acceptance_histogram of an answer")
    assert told.tells_rounds and not told.has_counters and "--disable-log-stats" in " ".join(told.untold)
    _, told = found(record(NO_ROUNDS, without=(INFO, "/metrics")))
    assert told.positions is None and "K is not told" in " ".join(told.untold)
    with serving(record(NO_ROUNDS, without=("/metrics",))) as url:
        server, told = running.find(Access(url))
        assert running.busy(server) is None and told.positions == 4


def test_an_older_vllm_tells_its_configuration_as_text():
    text = record(DETAILED)["paths"]["/server_info text"]
    _, told = found(record(DETAILED, without=(INFO,), server_info=text))
    assert (told.method, told.drafter, told.positions) == ("eagle3", "drafters/smollm2-135m-eagle3", 4)
    plain = {"vllm_config": "model='x', speculative_config=None, tokenizer='x'"}
    _, told = found(record(DETAILED, without=(INFO,), server_info=plain))
    assert (told.method, told.positions) == ("plain", 0)


def test_a_version_hidden_by_a_proxy_is_read_off_an_answer():
    server, _ = found(record(DETAILED, without=("/version",)))
    assert server.version == "0.32.0"
    told = record(DETAILED, without=("/version",))
    told["whole"]["system_fingerprint"] = None
    server, told = found(told)
    assert server.version == "" and server.definitions.rounds == "num_spec_steps" and "version" in told.untold[0]


def test_what_a_vllm_does():
    with serving(record(DETAILED)) as url:
        server, _ = running.find(Access(url))
        busy = running.busy(server)
    assert (busy.running, busy.waiting, busy.answered, busy.prompt_tokens, busy.generated_tokens) == (
        0,
        0,
        10,
        584,
        217,
    )
    assert busy.counters == {"rounds": 163, "drafted": 646, "accepted": [29, 8, 6, 0]}


def test_cached_tokens_and_a_salt():
    told = record(DETAILED) | {"cached": True}
    with serving(told) as url:
        server, told = running.find(Access(url))
        assert told.tells_cached and not [line for line in told.untold if "prefix cache" in line]
        for stream in (True, False):
            counts = [
                base.complete(server, list(range(40)), 4, stream=stream, salt=salt).cached_tokens
                for salt in ("a" + str(stream), "a" + str(stream), "b" + str(stream))
            ]
            assert counts == [0, 39, 0]


@pytest.mark.parametrize("field", ["return_token_ids", "cache_salt"])
def test_a_refused_field_is_named(field):
    with serving(record(DETAILED), refuses=field) as url:
        server = base.Server(url, "target", "vllm", "0.32.0")
        with pytest.raises(Eagle3Error, match=f"refuses the field {field} .*expected a server that takes it"):
            base.complete(server, [1, 2], 4, salt="x")


def test_a_proxy_that_strips_token_ids():
    with pytest.raises(Eagle3Error, match="returned no token ids; expected them .*does a proxy between strip fields"):
        found(record(DETAILED) | {"strips": True})


# ----------------------------------------------------------------------------------------------------------------- SGLang


def sglang(name="ngram", **fields):
    told = record(f"sglang/0.5.16_{name}")
    for path in ("/server_info", "/get_server_info"):
        told["paths"][path] |= fields
    return told


def eagle3(**fields):
    chain = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    return sglang(**chain | {"speculative_draft_model_path": "drafters/x"} | fields)


def test_an_sglang_tells_its_configuration():
    server, told = found(eagle3())
    assert (server.engine, server.version, server.model, server.tells_rounds) == ("sglang", "0.5.16", "target", False)
    assert (told.method, told.drafter, told.positions, told.positions_from) == (
        "eagle3",
        "drafters/x",
        3,
        "/server_info",
    )
    assert told.target == "models/SmolLM2-135M-Instruct" and told.tells_cached and told.takes_salt
    assert (told.dtype, told.max_model_len, told.prefix_caching, told.quantization) == ("bfloat16", 1024, True, "")
    assert told.engine_args == ["--chunked-prefill-size", "8192", "--tp-size", "1"]
    assert (told.data_parallel, told.prefill_chunk, told.stream_interval) == (1, 8192, 1)
    assert told.options["speculative_eagle_topk"] == 1 and not [name for name in told.options if "ngram" in name]
    assert "SGLANG_SIMULATE_ACC_LEN" in told.untold[0] and not told.has_counters
    running.refuse(told, 0)
    running.refuse(told, 1)


def test_recorded_sglangs():
    _, told = found(record("sglang/0.5.16_ngram"))
    assert (told.method, told.positions) == ("ngram", 4)
    assert told.options["speculative_ngram_max_bfs_breadth"] == 1
    _, told = found(record("sglang/0.5.16_plain"))
    assert (told.method, told.positions, told.options, told.untold) == ("plain", 0, {}, [])


def test_an_older_sglang():
    told = eagle3(version="0.5.12")
    del told["paths"]["/server_info"], told["paths"]["/v1/loads"]
    with serving(told) as url:
        server, told = running.find(Access(url))
        assert (server.version, told.positions, server.definitions.since) == ("0.5.12", 3, (0, 5, 12))
        busy = running.busy(server)
    assert (busy.running, busy.waiting, busy.answered) == (1, 0, None)


def test_counts_by_other_names_than_the_versions_are_left_out():
    with serving(eagle3(version="0.5.9")) as url:  # as a build between two releases may tell them
        server, _ = running.find(Access(url))
        answer = running.serving.complete(server, [1, 2], 8)
    assert answer.totals is None and answer.histogram is None and len(answer.output_ids) == 8


def test_an_sglang_behind_a_proxy_that_hides_its_configuration():
    told = record("sglang/0.5.16_ngram", without=("/server_info", "/get_server_info", "/v1/loads", "/get_load"))
    with serving(told) as url:
        server, told = running.find(Access(url))
        assert (server.engine, server.version, told.method, told.positions) == ("sglang", "", "", None)
        assert "proxy" in told.untold[0] and told.target == "models/SmolLM2-135M-Instruct"
        assert running.busy(server) is None


def test_an_sglangs_key_and_cache():
    with serving(eagle3(api_key=KEY), key=KEY) as url:
        server, told = running.find(Access(url, KEY))
        prompt = list(range(20))
        answers = [running.serving.complete(server, prompt, 8, salt=salt) for salt in ("a", "a", "b")]
        assert running.busy(server).running == 1 and running.greedy(server, prompt, 3) == [100, 101, 102]
    assert [answer.cached_tokens for answer in answers] == [0, 19, 0] and KEY not in repr(told)


# --------------------------------------------------------------------------------------------------------------- refusals


def vllm_set(**fields):
    told = record(DETAILED)
    told["paths"][INFO]["vllm_config"]["speculative_config"] |= fields
    return told


@pytest.mark.parametrize(
    "told, temperature, message",
    [
        (vllm_set(method="mtp"), 0, "method: found 'mtp'.*expected 'eagle3'"),
        (vllm_set(method="dflash"), 0, "method: found 'dflash'"),
        (vllm_set(method="medusa"), 0, "method: found 'medusa'"),
        (vllm_set(method="eagle"), 0, "method: found 'eagle', which stands for EAGLE-1"),
        (vllm_set(rejection_sample_method="synthetic"), 0, "rejection_sample_method: found 'synthetic'"),
        (vllm_set(synthetic_acceptance_rates=[0.5]), 0, "synthetic_acceptance_rates"),
        (vllm_set(rejection_sample_method="block"), 1, "rejection_sample_method: found 'block' at temperature 1"),
        (vllm_set(draft_sample_method="probabilistic"), 1, "draft_sample_method"),
        (sglang(), 0, "method: found 'ngram'"),
        (eagle3(speculative_algorithm="EAGLE"), 0, "EAGLE-1, EAGLE-2 and a target's own MTP layers"),
        (eagle3(speculative_algorithm="DFLASH"), 0, "method: found 'dflash'"),
        (eagle3(speculative_eagle_topk=4, speculative_num_draft_tokens=8), 0, "--speculative-eagle-topk: found 4"),
        (eagle3(speculative_num_draft_tokens=6), 0, "--speculative-num-draft-tokens: found 6"),
        (eagle3(speculative_accept_threshold_single=0.9), 1, "--speculative-accept-threshold-single: found 0.9 at"),
        (eagle3(speculative_adaptive=True), 0, "--speculative-adaptive"),
        (eagle3(speculative_use_rejection_sampling=True), 0, "--speculative-use-rejection-sampling"),
        (eagle3(stream_interval=4), 0, "stream_interval: found 4"),
    ],
)
def test_refused_by_name(told, temperature, message):
    _, told = found(told)
    with pytest.raises(Eagle3Error, match=message):
        running.refuse(told, temperature)


def test_thresholds_pass_at_temperature_0():
    _, told = found(eagle3(speculative_accept_threshold_single=0.9))
    running.refuse(told, 0)


# ----------------------------------------------------------------------------------------------------- models and addresses


def cards(*rows):
    return {"data": [{"id": id, "owned_by": "vllm", "root": root, "parent": parent} for id, root, parent in rows]}


def test_which_model_is_asked_for():
    lora = cards(("base", "models/x", None), ("helper", "loras/y", "base"))
    with serving(record(DETAILED, v1__models=lora)) as url:
        with pytest.raises(Eagle3Error, match="found none, expected one of .*'base', 'helper' .LoRA of 'base'"):
            running.find(Access(url))
        with pytest.raises(Eagle3Error, match="model: found 'other', expected one .*'base'"):
            running.find(Access(url), "other")
        server, told = running.find(Access(url), "base")
        assert (server.model, told.models, told.parent) == ("base", ["base", "helper"], "")
        _, told = running.find(Access(url), "helper")
        with pytest.raises(Eagle3Error, match="'helper', a LoRA adapter of 'base'"):
            running.refuse(told, 0)
    server, _ = found(record(DETAILED, v1__models=cards(("one", "models/x", None), ("alias", "models/x", None))))
    assert server.model == "one"


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions", "/v1/models"])
def test_addresses(end):
    assert Access(f"http://host:8000/team/model{end}").root == "http://host:8000/team/model"


@pytest.mark.parametrize(
    "url, message",
    [
        ("host:8000", "expected http://HOST:PORT"),
        ("ftp://host", "expected http://HOST:PORT"),
        ("http://", "expected http://HOST:PORT"),
        ("http://host:port", "found no address"),
        (f"http://user:{KEY}@host", "found a user name"),
        (f"http://host/?key={KEY}", "a query"),
    ],
)
def test_what_is_no_address(url, message):
    with pytest.raises(Eagle3Error, match=message) as error:
        Access(url)
    assert KEY not in str(error.value)


def test_a_path_prefix_and_a_key():
    seen = []
    with serving(record(DETAILED), prefix="/team/a", key=KEY, seen=seen) as url:
        server, _ = running.find(Access(f"{url}/team/a/v1/", KEY, {"X-Team": "blue"}))
        base.complete(server, [1], 4, stream=False)
    paths = [path for path, _ in seen]
    assert {"/v1/models", "/version", "/metrics", "/v1/completions"} <= set(paths) and "" not in paths
    assert all(headers["x-team"] == "blue" and headers["authorization"] == f"Bearer {KEY}" for _, headers in seen)


def test_headers_instead_of_a_key_and_none_at_all():
    seen = []
    with serving(record(DETAILED), seen=seen) as url:
        running.find(Access(url, KEY, {"authorization": "Basic abc"}))
        assert {headers["authorization"] for _, headers in seen} == {"Basic abc"}
        seen.clear()
        running.find(Access(url))
        assert not [headers for _, headers in seen if "authorization" in headers]


def test_a_key_appears_nowhere(caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    access = Access("http://127.0.0.1:9", KEY, {"X-Key": "also-secret-1234"})
    server = base.Server(access.root, "target", "vllm", "0.32.0", access=access)
    shown = repr(access) + repr(server) + str(dataclasses.replace(server, load_s=1))
    wrong = "sk-another-secret-99"
    with serving(record(DETAILED), key=KEY) as url:
        for call in (
            lambda: running.find(Access(url, wrong)),
            lambda: base.complete(base.Server(url, "target", "vllm", "0", access=Access(url, wrong)), [1], 2),
        ):
            with pytest.raises(Eagle3Error) as error:
                call()
            shown += "".join(traceback.format_exception(error.value))
        server, told = running.find(Access(url, KEY, {"X-Key": "also-secret-1234"}))
        shown += repr(server) + repr(told) + json.dumps(dataclasses.asdict(told))
    shown += caplog.text
    assert not [secret for secret in (KEY, "also-secret-1234", wrong) if secret in shown]
    assert "401" in shown and pickle.loads(pickle.dumps(access)) == access


@pytest.mark.parametrize("key", ["line\n", "two words", "schlüssel"])
def test_keys_that_cannot_be_sent(key):
    with pytest.raises(Eagle3Error, match="key: found") as error:
        Access("http://host", key)
    assert key not in str(error.value)
    with pytest.raises(Eagle3Error, match="headers: 'X'"):
        Access("http://host", headers={"X": "a\nb"})


def test_short_secrets_are_hidden_as_words():
    access = Access("http://host", "abc", {"X-Key": "secret value-of-it"})
    assert access.hide("the key abc, not abcdef; secret value-of-it") == "the key ***, not abcdef; ***"


# ----------------------------------------------------------------------------------------------------- what is no engine


def other(owner, **paths):
    return {"paths": {"/v1/models": {"data": [{"id": "m", "owned_by": owner}]}, **paths}}


@pytest.mark.parametrize(
    "told, options, message",
    [
        (record(DETAILED), {"page": True}, "answers 200 with a web page; expected the list of models"),
        (record(DETAILED), {"prefix": "/elsewhere"}, "/v1/models answers 404 .*Not Found"),
        (record(DETAILED), {"key": KEY}, "key: .*refuses a request without a key .401.; expected the key"),
        (record(DETAILED), {"moved": "http://127.0.0.1:9"}, "sends on to http://127.0.0.1:9/v1/models"),
        (other("llamacpp"), {}, "serves 'm' of 'llamacpp' and is none of vllm, sglang: found no vllm: metrics"),
        (other("openai"), {}, "serves 'm' of 'openai' and is none"),
        (other("x", **{"/version": {"version": "1.2"}}), {}, "is none of vllm, sglang"),
        ({"paths": {"/info": {"model_id": "x"}}}, {}, "/v1/models answers 404"),
        ({"paths": {"/v1/models": {"data": []}}}, {}, "lists no model"),
        ({"paths": {"/v1/models": {"models": []}}}, {}, "answers 200 .*expected the list of models"),
    ],
)
def test_what_is_no_engine(told, options, message):
    with pytest.raises(Eagle3Error, match=message):
        found(told, **options)


def test_nothing_listens():
    with pytest.raises(Eagle3Error, match="url: http://127.0.0.1:9/v1/models cannot be reached .*refused"):
        running.find(Access("http://127.0.0.1:9"))


def test_something_that_does_not_speak_http():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(Eagle3Error, match="gave no answer in 0.5 s"):
            running.find(Access(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5))
        assert time.monotonic() - started < 5


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("openssl"), reason="makes its certificate with openssl")
def test_tls(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=stub -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(words.split(), check=True, capture_output=True)
    with serving(record(DETAILED), ssl_keyfile=key, ssl_certfile=certificate) as url:
        with pytest.raises(Eagle3Error, match="CERTIFICATE_VERIFY_FAILED.*ca_file"):
            running.find(Access(url))
        for access in (Access(url, ca_file=str(certificate)), Access(url, verify=False)):
            server, told = running.find(access)
            assert told.positions == 4 and base.complete(server, [1], 4).accepted
        with pytest.raises(Eagle3Error, match="cannot be reached"):
            running.find(Access(url.replace("https", "http")))
    with serving(record(DETAILED)) as url, pytest.raises(Eagle3Error, match="does the server speak http, not https"):
        running.find(Access(url.replace("http", "https")))
    with pytest.raises(Eagle3Error, match="ca_file: found no file"):
        Access("https://host", ca_file="nothing.pem")
    with pytest.raises(Eagle3Error, match="found no certificates in it"):
        running.find(Access("https://host", ca_file=str(stub_running.FOLDER / "README.md")))
