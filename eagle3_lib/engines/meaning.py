"""Settings under which an engine's accepted counts mean something else than this project reads from them.

Here a round verifies one chain of drafts, each the drafter's likeliest token; at temperature 0 a draft is accepted
where it is the target's likeliest token, above it with the target's probability of it. A replay says how many those
are, and counts by position are counts by depth of that chain. What changes this is refused before a run starts; a
setting that has no effect at temperature 0 is refused above it only. The settings themselves, and where they were read,
stand in ``spec.py`` of each engine.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Eagle3Error
from .registry import ENGINES
from .settings import is_above
from .spec import EngineSpec


def refuse(
    engine: str,
    speculative_options: Mapping[str, Any],
    engine_args: Sequence[str],
    environment: Mapping[str, str],
    temperature: float,
) -> None:
    """Refuse settings under which accepted counts mean something else; a file given by --config is not looked into.

    Args:
        engine: its name; of one that is not registered nothing is known and nothing refused.
        speculative_options: fields of vLLM's --speculative-config, or SGLang's settings by the names of its
            /server_info ("speculative_eagle_topk"). Where ``engine_args`` say otherwise, these count.
        engine_args: command-line words, "--flag value" or "--flag=value"; the last of several counts.
        environment: the environment of the engine.
        temperature: of the requests.
    Raises:
        Eagle3Error: names the setting, what was found, why rounds are not the target's decision then, what is expected;
            or a --speculative-config that is no JSON object.
    """
    if engine not in ENGINES:
        return
    spec = ENGINES[engine].spec
    given = _all_given(spec, speculative_options, engine_args)
    for setting in spec.settings:
        if setting.changes(given.get(setting.name), given) and (setting.greedy_too or temperature > 0):
            found = "nothing" if given.get(setting.name) is None else repr(given[setting.name])
            at = "" if setting.greedy_too else f" at temperature {temperature:g}"
            raise Eagle3Error(f"{setting.name}: found {found}{at}: {setting.why}; expected {setting.expected}")
    for name in spec.made_up_by:
        if is_above(0)(environment.get(name), {}):
            found = f"{name}={environment[name]}"
            raise Eagle3Error(
                f"environment: found {found}: {spec.name} then makes up what each round accepts; expected it unset"
            )


def notes(
    engine: str, speculative_options: Mapping[str, Any], engine_args: Sequence[str], temperature: float
) -> list[str]:
    """Sentences for a report on settings that :func:`refuse` lets pass; its arguments."""
    sentences: list[str] = []
    if engine in ENGINES:
        spec = ENGINES[engine].spec
        given = _all_given(spec, speculative_options, engine_args)
        sentences += [
            f"{setting.name} is {given[setting.name]!r}, which has no effect at temperature 0."
            for setting in spec.settings
            if temperature == 0 and not setting.greedy_too and setting.changes(given.get(setting.name), given)
        ]
        sentences += [sentence for name, sentence in spec.remarks if given.get(name)]
    if temperature > 0:
        sentences.append(
            f"At temperature {temperature:g} a correct engine accepts a draft with the target's probability of it."
        )
    return sentences


def _all_given(spec: EngineSpec, speculative_options: Mapping[str, Any], engine_args: Sequence[str]) -> dict[str, Any]:
    """All settings by the names that ``spec.settings`` has: {name: value}; True for a flag without a value."""
    words = _by_option(engine_args)
    if not spec.settings_in:
        return words | {_option(name): value for name, value in speculative_options.items()}
    config: dict[str, Any] = {}
    for name in spec.settings_in:
        config |= _parsed(name, words[name]) if name in words else {}
    for name, value in words.items():
        option, _, key = name.partition(".")  # vLLM also takes one field a word: --speculative-config.FIELD VALUE
        if option in spec.settings_in and key:
            config[key] = value
    spelled = {key.replace("-", "_"): value for key, value in config.items()}
    return spelled | dict(speculative_options)


def _by_option(words: Sequence[str]) -> dict[str, Any]:
    """{option: value} of command-line words, the last of several; True for a flag without a value."""
    given: dict[str, Any] = {}
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


def _parsed(name: str, text: object) -> dict[str, Any]:
    try:
        config = json.loads(str(text))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise Eagle3Error(f"engine_args: {name}: found {text!r}, expected a JSON object")
    return config
