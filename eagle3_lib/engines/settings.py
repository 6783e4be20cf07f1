"""A setting of an engine that can change what an accepted count means, and the conditions on its value.

Here a round verifies one chain of drafts, each the drafter's likeliest token; at temperature 0 a draft is accepted
where it is the target's likeliest token, above it with the target's probability of it. An engine's ``spec.py`` lists the
settings that change this; :mod:`eagle3_lib.engines.meaning` refuses them before a run starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Given = Mapping[str, Any]  # all settings that are given, by name
Condition = Callable[[object, Given], bool]

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
    changes: Condition
    why: str
    expected: str
    greedy_too: bool = True


def is_one_of(*values: str) -> Condition:
    return lambda value, _: value in values


def is_none_of(*values: str) -> Condition:
    return lambda value, _: value is not None and value not in values


def is_given(value: object, _: Given) -> bool:
    return value is not None


def is_on(value: object, _: Given) -> bool:
    return value is not None and str(value).lower() not in ("false", "0")


def is_above(limit: float) -> Condition:
    return lambda value, _: value is not None and not number(value) <= limit


def is_other_than(expected: float) -> Condition:
    return lambda value, _: value is not None and number(value) != expected


def number(value: object) -> float:
    """A number from the command line; nan, which no comparison holds for, where it is none."""
    try:
        return float(str(value))
    except ValueError:
        return float("nan")
