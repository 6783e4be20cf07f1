"""Settings under which an engine's accepted counts mean something else than this project reads from them.

Here a round verifies one chain of drafts, each the drafter's likeliest token; at temperature 0 a draft is accepted
where it is the target's likeliest token, above it with the target's probability of it. A replay says how many those
are, and counts by position are counts by depth of that chain. What changes this is refused before a run starts; a
setting that has no effect at temperature 0 is refused above it only.

Read in vLLM 0.8.5, 0.16.0, 0.23.0, 0.26.0, 0.28.0, 0.32.0, 0.33.0:

- config/speculative.py (config.py in 0.8.5): names, values, defaults. rejection_sample_method: synthetic from 0.23 on,
  block in 0.26, fly in 0.33; draft_sample_method from 0.23 on; speculative_token_tree in 0.16, gone in 0.23; typical
  acceptance (acceptance_method, posterior_threshold, posterior_alpha) in 0.8.5, gone in 0.16.
- v1/worker/gpu/spec_decode/rejection_sampler_utils.py, v1/sample/rejection_sampler.py: "synthetic" decides for greedy
  requests too; "block" does not in the first, and the second does not know it.
- v1/spec_decode/fly.py (0.33): also greedy requests accept what the target's argmax rejects.
- v1/spec_decode/llm_base_proposer.py: probabilistic drafts are argmax for greedy requests.
- model_executor/layers/typical_acceptance_sampler.py (0.8.5): accepts what is likelier than min(posterior_threshold,
  posterior_alpha * exp(-entropy)); at temperature 0 that is the likeliest token alone.
- use_heterogeneous_vocab is not refused: vLLM itself takes it with method draft_model alone, and it limits drafts to
  shared tokens without a change to their verification.

Read in SGLang 0.5.8, 0.5.16, 0.5.23:

- srt/server_args.py, srt/arg_groups/fields/spec.py (0.5.23): options and defaults; srt/arg_groups/speculative_hook.py:
  topk 1 makes the draft tokens steps + 1, with a warning; block verification turns rejection sampling on; without steps
  a Llama or Grok target gets a tree (5 steps, topk 4, 8 draft tokens); n-gram's breadth is its topk.
- srt/speculative/eagle_utils.py (eagle_sample): thresholds reach the sampling kernel alone, greedy batches do not; on
  cpu and xpu every batch is verified greedily; SGLANG_SIMULATE_ACC_LEN above 0 replaces the counts of both.
- srt/speculative/eagle_worker_v2.py, spec_utils.py, srt/sampling/sampling_params.py: rejection sampling draws the
  drafts. A request at temperature 0 is one at temperature 1 with top_k 1: 0.5.16 draws its drafts at temperature 1,
  0.5.23 still the one that follows prefill. So it is refused at temperature 0 too.
- srt/speculative/adaptive_spec_params.py: adaptive steps vary between rounds, down to 0; no answer tells those of a
  round, and spec_num_proposed_drafts (srt/managers/tokenizer_manager.py) multiplies rounds by the configured number.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import Eagle3Error

SPECULATIVE_CONFIG = ("--speculative-config", "-sc")
SIMULATED_LENGTH = ("SGLANG_SIMULATE_ACC_LEN", "SGL_SIMULATE_ACC_LEN")  # SGLang renames the older one itself
OTHER_DRAFTS = "the drafts are drawn from the drafter's distribution and are not its likeliest tokens"
TREE = "the drafts are a tree, so that a round verifies several branches and counts the longest"
UNREAD = "what it accepts was not read"


@dataclass(frozen=True)
class Setting:
    """A setting that can change what an accepted count means.

    name: as the engine spells it: a key of vLLM's --speculative-config, an option of SGLang. changes: whether it does,
    of its value (None where it is not given) and all that is given, by name. why: what rounds then are. expected: what
    to set. greedy_too: at temperature 0 as well.
    """

    name: str
    changes: Callable[[object, Mapping], bool]
    why: str
    expected: str
    greedy_too: bool = True


def _is(*values: str) -> Callable[[object, Mapping], bool]:
    return lambda value, _: value in values


def _is_none_of(*values: str) -> Callable[[object, Mapping], bool]:
    return lambda value, _: value is not None and value not in values


def _given(value: object, _: Mapping) -> bool:
    return value is not None


def _on(value: object, _: Mapping) -> bool:
    return value is not None and str(value).lower() not in ("false", "0")


def _above(limit: float) -> Callable[[object, Mapping], bool]:
    return lambda value, _: value is not None and not _number(value) <= limit


def _other_than(number: float) -> Callable[[object, Mapping], bool]:
    return lambda value, _: value is not None and _number(value) != number


def _branches(tree: object, _: Mapping) -> bool:
    """Whether a token tree, such as "[(0,), (0, 0), (1,)]", has a node besides the first at any depth."""
    return tree is not None and bool(set(re.findall(r"\d+", str(tree))) - {"0"})


def _not_one_more_than_steps(draft_tokens: object, given: Mapping) -> bool:
    steps = given.get("--speculative-num-steps")
    if draft_tokens is None or steps is None or given.get("--speculative-algorithm") == "NGRAM":
        return False
    return _number(draft_tokens) != _number(steps) + 1


def _left_to_sglang(steps: object, given: Mapping) -> bool:
    return steps is None and given.get("--speculative-algorithm") in ("EAGLE", "EAGLE3", "NEXTN")


def _number(value: object) -> float:
    """A number from the command line; nan, which no comparison holds for, where it is none."""
    try:
        return float(str(value))
    except ValueError:
        return float("nan")


SETTINGS = {
    "vllm": (
        Setting(
            "rejection_sample_method",
            _is("synthetic"),
            "it accepts drafts at configured rates, whatever the target says",
            '"standard"',
        ),
        Setting("synthetic_acceptance_rates", _given, "they replace the target's decision", "none"),
        Setting("synthetic_acceptance_length", _given, "it replaces the target's decision", "none"),
        Setting(
            "rejection_sample_method",
            _is("fly"),
            "it is lossy: where the target is unsure it accepts a draft that the target rejects, if the next ones fit",
            '"standard"',
        ),
        Setting(
            "rejection_sample_method",
            _is("block"),
            "it accepts or rejects the drafts of a round jointly, so that the chance of one depends on the others",
            '"standard", or temperature 0',
            greedy_too=False,
        ),
        Setting("rejection_sample_method", _is_none_of("standard", "synthetic", "fly", "block"), UNREAD, '"standard"'),
        Setting(
            "draft_sample_method", _is("probabilistic"), OTHER_DRAFTS, '"greedy", or temperature 0', greedy_too=False
        ),
        Setting("draft_sample_method", _is_none_of("greedy", "probabilistic"), UNREAD, '"greedy"'),
        Setting("speculative_token_tree", _branches, TREE, "none, which is a chain"),
        Setting(
            "acceptance_method",
            _is_none_of("rejection_sampler"),
            "it accepts every draft that is likely enough, not as often as the target would choose it",
            '"rejection_sampler", or temperature 0',
            greedy_too=False,
        ),
    ),
    "sglang": (
        Setting("--speculative-eagle-topk", _above(1), TREE, "1"),
        Setting("--speculative-ngram-max-bfs-breadth", _above(1), TREE, "1"),
        Setting(
            "--speculative-num-draft-tokens",
            _not_one_more_than_steps,
            "the drafts are a tree, or SGLang changes the number without being asked",
            "--speculative-num-steps + 1, a chain and its root",
        ),
        Setting(
            "--speculative-num-steps",
            _left_to_sglang,
            "SGLang then chooses by the target's architecture, for some a tree",
            "the number of drafts, K",
        ),
        Setting(
            "--speculative-accept-threshold-single",
            _other_than(1),
            "every draft with a probability above it is accepted",
            "1, or temperature 0",
            greedy_too=False,
        ),
        Setting(
            "--speculative-accept-threshold-acc",
            _other_than(1),
            "a draft is accepted with its probability divided by it",
            "1, or temperature 0",
            greedy_too=False,
        ),
        Setting("--speculative-use-rejection-sampling", _on, f"{OTHER_DRAFTS}, at temperature 0 too", "none"),
        Setting(
            "--speculative-use-block-verification",
            _on,
            f"{OTHER_DRAFTS}, at temperature 0 too, and are accepted or rejected jointly",
            "none",
        ),
        Setting(
            "--speculative-adaptive",
            _on,
            "K varies between rounds, and no answer tells the drafts of a round",
            "none, with a fixed --speculative-num-steps",
        ),
        Setting(
            "--device",
            _is("cpu", "xpu"),
            "drafts are verified by the target's likeliest token, whatever the temperature",
            "temperature 0",
            greedy_too=False,
        ),
    ),
}


def refuse(
    engine: str,
    speculative_options: Mapping,
    engine_args: Sequence[str],
    environment: Mapping[str, str],
    temperature: float,
) -> None:
    """Refuse settings under which accepted counts mean something else; a file given by --config is not looked into.

    Args:
        engine: "vllm" or "sglang"; of another one nothing is known and nothing refused.
        speculative_options: fields of vLLM's --speculative-config, or SGLang's settings by the names of its
            /server_info ("speculative_eagle_topk"). Where ``engine_args`` say otherwise, these count.
        engine_args: command-line words, "--flag value" or "--flag=value"; the last of several counts.
        environment: the environment of the engine.
        temperature: of the requests.
    Raises:
        Eagle3Error: names the setting, what was found, why rounds are not the target's decision then, what is expected;
            or a --speculative-config that is no JSON object.
    """
    given = _all_given(engine, speculative_options, engine_args)
    for setting in SETTINGS.get(engine, ()):
        if setting.changes(given.get(setting.name), given) and (setting.greedy_too or temperature > 0):
            found = "nothing" if given.get(setting.name) is None else repr(given[setting.name])
            at = "" if setting.greedy_too else f" at temperature {temperature:g}"
            raise Eagle3Error(f"{setting.name}: found {found}{at}: {setting.why}; expected {setting.expected}")
    for name in SIMULATED_LENGTH if engine == "sglang" else ():
        if _above(0)(environment.get(name), {}):
            found = f"{name}={environment[name]}"
            raise Eagle3Error(
                f"environment: found {found}: SGLang then makes up what each round accepts; expected it unset"
            )


def notes(engine: str, speculative_options: Mapping, engine_args: Sequence[str], temperature: float) -> list[str]:
    """Sentences for a report on settings that :func:`refuse` lets pass; its arguments."""
    given = _all_given(engine, speculative_options, engine_args)
    sentences = [
        f"{setting.name} is {given[setting.name]!r}, which has no effect at temperature 0."
        for setting in SETTINGS.get(engine, ())
        if temperature == 0 and not setting.greedy_too and setting.changes(given.get(setting.name), given)
    ]
    if given.get("num_speculative_tokens_per_batch_size"):
        sentences.append("K follows the number of requests under way (num_speculative_tokens_per_batch_size).")
    if temperature > 0:
        sentences.append(
            f"At temperature {temperature:g} a correct engine accepts a draft with the target's probability of it."
        )
    return sentences


def _all_given(engine: str, speculative_options: Mapping, engine_args: Sequence[str]) -> dict:
    """All settings by the names that SETTINGS has: {name: value}; True for a flag without a value."""
    words = _by_option(engine_args)
    if engine == "sglang":
        return words | {_option(name): value for name, value in speculative_options.items()}
    config: dict = {}
    for name in SPECULATIVE_CONFIG:
        config |= _parsed(name, words[name]) if name in words else {}
    for name, value in words.items():
        option, _, key = name.partition(".")  # vLLM also takes one field a word: --speculative-config.FIELD VALUE
        if option in SPECULATIVE_CONFIG and key:
            config[key] = value
    spelled = {key.replace("-", "_"): value for key, value in config.items()}
    return spelled | dict(speculative_options)


def _by_option(words: Sequence[str]) -> dict:
    """{option: value} of command-line words, the last of several; True for a flag without a value."""
    given: dict = {}
    option = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.partition("=")
            option = _option(name) if name.startswith("--") else name
            given[option] = value if equals else True
        elif option:
            given[option] = word
            option = ""
    return given


def _option(name: str) -> str:
    """An option with dashes: both engines' fields have underscores, and vLLM takes both."""
    head, dot, field = name.removeprefix("--").partition(".")
    return f"--{head.replace('_', '-')}{dot}{field}"


def _parsed(name: str, text: object) -> dict:
    try:
        config = json.loads(str(text))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise Eagle3Error(f"engine_args: {name}: found {text!r}, expected a JSON object")
    return config
