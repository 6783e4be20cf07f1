"""Settings under which an accepted count means something else are refused, wherever they are given."""

import json

import pytest

from eagle3_lib.engines import base, meaning
from eagle3_lib.engines.sglang import server as sglang
from eagle3_lib.errors import Eagle3Error

DRAFTER = "drafters/smollm2-135m-eagle3"
CHAIN = "[(0,), (0, 0), (0, 0, 0)]"
TREE = "[(0,), (1,), (0, 0)]"

# Refused: (speculative options of vLLM, whether only above temperature 0, what the message says).
VLLM_REFUSED = [
    ({"rejection_sample_method": "synthetic"}, False, "configured rates"),
    ({"synthetic_acceptance_rates": [0.8, 0.6]}, False, "synthetic_acceptance_rates: found .0.8, 0.6."),
    ({"synthetic_acceptance_length": 2.5}, False, "synthetic_acceptance_length: found 2.5"),
    ({"rejection_sample_method": "fly"}, False, "lossy"),
    ({"rejection_sample_method": "block"}, True, "jointly"),
    ({"rejection_sample_method": "of_tomorrow"}, False, "was not read"),
    ({"draft_sample_method": "probabilistic"}, True, "not its likeliest tokens"),
    ({"draft_sample_method": "of_tomorrow"}, False, "was not read"),
    ({"speculative_token_tree": TREE}, False, "several branches"),
    ({"acceptance_method": "typical_acceptance_sampler", "posterior_threshold": 0.09}, True, "likely enough"),
]
VLLM_TAKEN = [
    {},
    {"rejection_sample_method": "standard", "draft_sample_method": "greedy"},
    {"synthetic_acceptance_rates": None},
    {"speculative_token_tree": CHAIN},
    {"acceptance_method": "rejection_sampler", "posterior_threshold": 0.09},  # read with the other method alone
    {"max_model_len": 512},
]

# Refused: (words, whether only above temperature 0, what the message says).
SGLANG_REFUSED = [
    (["--speculative-eagle-topk", "4"], False, "--speculative-eagle-topk: found '4': .* tree"),
    (["--speculative-eagle-topk=2"], False, "tree"),
    (["--speculative-eagle-topk", "many"], False, "found 'many'"),
    (["--speculative-ngram-max-bfs-breadth", "10"], False, "tree"),
    (["--speculative-num-steps", "3", "--speculative-num-draft-tokens", "8"], False, "found '8'.*num-steps . 1"),
    (["--speculative-algorithm", "EAGLE3"], False, "found nothing"),
    (["--speculative-accept-threshold-single", "0.5"], True, "found '0.5' at temperature 0.8"),
    (["--speculative-accept-threshold-acc=0.9"], True, "divided"),
    (["--speculative-use-rejection-sampling"], False, "temperature 0 too"),
    (["--speculative-use-block-verification"], False, "jointly"),
    (["--speculative-adaptive", "--speculative-adaptive-config", "steps.json"], False, "K varies"),
    (["--device", "cpu"], True, "likeliest token"),
]
SGLANG_TAKEN = [
    [],
    ["--speculative-eagle-topk", "4", "--speculative-eagle-topk", "1"],  # the last one counts
    ["--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4", "--speculative-eagle-topk", "1"],
    ["--speculative-algorithm", "NGRAM", "--speculative-num-steps", "4", "--speculative-num-draft-tokens", "4"],
    ["--speculative-accept-threshold-single", "1.0", "--speculative-accept-threshold-acc=1"],
    ["--attention-backend", "triton", "--mem-fraction-static", "0.8"],
]


def _message(engine, options=(), words=(), environment=(), temperature=0.0) -> str:
    """What is refused, "" where nothing is."""
    try:
        meaning.refuse(engine, dict(options), list(words), dict(environment), temperature)
    except Eagle3Error as error:
        return str(error)
    return ""


def _spellings(options: dict) -> list[list[str]]:
    """vLLM's ways to give one --speculative-config on the command line."""
    text = json.dumps(options)
    fields = [[f"--speculative-config.{key}", str(value)] for key, value in options.items()]
    return [
        ["--speculative-config", text],
        [f"--speculative-config={text}"],
        ["--speculative_config", text],
        ["-sc", text],
        [f"-sc={text}"],
        ["--seed", "1", "--speculative-config", text, "--enforce-eager"],
        [word for pair in fields for word in pair],
    ]


@pytest.mark.parametrize(("options", "above_zero_only", "said"), VLLM_REFUSED, ids=str)
def test_vllm_refused(options, above_zero_only, said):
    places = [{"options": options}, *({"words": words} for words in _spellings(options))]
    for place in places:
        pytest.raises(Eagle3Error, meaning.refuse, "vllm", place.get("options", {}), place.get("words", []), {}, 0.8)
        assert bool(_message("vllm", **place)) is not above_zero_only
    with pytest.raises(Eagle3Error, match=said):
        meaning.refuse("vllm", options, [], {}, 0.8)


@pytest.mark.parametrize("options", VLLM_TAKEN, ids=str)
def test_vllm_taken(options):
    assert _message("vllm", options, temperature=0.8) == ""
    assert _message("vllm", words=["--speculative-config", json.dumps(options)], temperature=0.8) == ""


@pytest.mark.parametrize(("words", "above_zero_only", "said"), SGLANG_REFUSED, ids=str)
def test_sglang_refused(words, above_zero_only, said):
    with pytest.raises(Eagle3Error, match=said):
        meaning.refuse("sglang", {}, words, {}, 0.8)
    assert bool(_message("sglang", words=words)) is not above_zero_only


@pytest.mark.parametrize("words", SGLANG_TAKEN, ids=str)
def test_sglang_taken(words):
    assert _message("sglang", words=words, temperature=0.8) == ""


@pytest.mark.parametrize("speculation", [base.Speculation("base", DRAFTER, 4), base.Speculation("ngram", tokens=3)])
def test_what_the_project_itself_asks_of_sglang_is_taken(speculation):
    words = sglang.speculative_arguments(speculation)
    assert _message("sglang", words=words, temperature=0.8) == ""
    assert "tree" in _message("sglang", words=[*words, "--speculative-eagle-topk", "2"]) or speculation.mode == "ngram"


def test_a_running_sglangs_settings_are_read_by_their_names():
    told = {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "speculative_accept_threshold_single": 1.0,
        "speculative_adaptive": False,
        "device": "cuda",
    }
    assert _message("sglang", told, temperature=0.8) == ""
    assert "tree" in _message("sglang", told | {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8})
    assert "K varies" in _message("sglang", told | {"speculative_adaptive": True})


@pytest.mark.parametrize(
    ("engine", "environment", "refused"),
    [
        ("sglang", {"SGLANG_SIMULATE_ACC_LEN": "2.5"}, True),
        ("sglang", {"SGL_SIMULATE_ACC_LEN": "2.5"}, True),
        ("sglang", {"SGLANG_SIMULATE_ACC_LEN": "-1"}, False),
        ("sglang", {"SGLANG_SIMULATE_ACC_METHOD": "match-expected"}, False),  # nothing without a length
        ("vllm", {"SGLANG_SIMULATE_ACC_LEN": "2.5"}, False),
    ],
)
def test_simulated_acceptance(engine, environment, refused):
    message = _message(engine, environment=environment)
    assert bool(message) is refused
    assert not refused or "SIMULATE_ACC_LEN=2.5" in message


def test_a_config_that_is_no_object():
    for text in ("{", "[1]"):
        with pytest.raises(Eagle3Error, match="--speculative-config: found .* expected a JSON object"):
            meaning.refuse("vllm", {}, ["--speculative-config", text], {}, 0.0)


def test_notes_say_what_is_let_pass():
    options = {"rejection_sample_method": "block", "num_speculative_tokens_per_batch_size": [[1, 8, 4]]}
    first, second = meaning.notes("vllm", options, [], 0.0)
    assert "rejection_sample_method is 'block'" in first and "no effect at temperature 0" in first
    assert "number of requests under way" in second
    assert meaning.notes("vllm", {}, [], 0.0) == []
    assert "target's probability" in meaning.notes("sglang", {}, [], 0.6)[0]


def test_nothing_is_known_of_another_engine():
    assert _message("other", {"rejection_sample_method": "synthetic"}) == ""
