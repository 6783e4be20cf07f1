"""What a running server is asked, and in which state: with a cold and a warm prefix cache, on long prompts, in company.

Faults of a server's state show in one of them alone (vllm#47930: acceptance falls with prefix caching). A salt separates the
prefix cache of a request from all others, so that the first ask with a new salt is cold, whatever was asked before, and a second one
right after it is warm. Requests are asked one at a time; in company only where the engine tells the rounds of each answer,
since streamed chunks tell them for one request at a time.
"""

import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..results import MeasuredRequest
from ..verdict.evidence import COLD, TOGETHER, WARM

LONG_PROMPTS, LONG_TOKENS = (
    5,
    300,
)  # asked cold and warm: two cache blocks of 128 tokens, of which vLLM drops the last for EAGLE
IN_COMPANY = 4  # prompts that are asked once more, all at once


@dataclass(frozen=True)
class Ask:
    """One request. condition: "" where the server does not separate prefix caches. salt: see :func:`eagle3_lib.engines.base.complete`."""

    id: str
    prompt_ids: list[int]
    condition: str = ""
    salt: str = ""


Group = list[Ask]  # asked one after the other
One = Callable[[Ask], MeasuredRequest]


def plan(
    prompts: Sequence[tuple[str, list[int]]], long_prompts: Sequence[tuple[str, list[int]]], in_company: bool
) -> tuple[list[Group], list[Ask]]:
    """The groups of requests, and those that are asked all at once afterwards.

    A group is asked as a whole: what is warm in it was made so by the request before.

    Args:
        prompts: (id, token ids), each asked once, cold.
        long_prompts: of :func:`lengthened`, each asked cold and then warm.
        in_company: whether some prompts are asked again together.
    """
    groups: list[Group] = [[Ask(name, ids, COLD, _salt())] for name, ids in prompts]
    for name, ids in long_prompts:
        salt = _salt()
        groups.append([Ask(f"{name} {COLD}", ids, COLD, salt), Ask(f"{name} {WARM}", ids, WARM, salt)])
    some = prompts[:IN_COMPANY] if in_company else []
    return groups, [Ask(f"{name} {TOGETHER}", ids, TOGETHER, _salt()) for name, ids in some]


def lengthened(texts: Sequence[str], render: Callable[[str], list[int]], most: int) -> list[tuple[str, list[int]]]:
    """(id, token ids) of a few long prompts, each of several texts in another order.

    Args:
        render: a user's text as a prompt. most: tokens that a prompt may have.
    Returns:
        prompts of LONG_TOKENS to ``most`` tokens; [] where the texts do not make them.
    """
    found: list[tuple[str, list[int]]] = []
    for number in range(min(LONG_PROMPTS, len(texts))):
        turned = [*texts[number:], *texts[:number]]
        for count in range(1, len(turned) + 1):
            ids = render("\n".join(turned[:count]))
            if len(ids) >= LONG_TOKENS:
                break
        if LONG_TOKENS <= len(ids) <= most:
            found.append((f"long {number}", ids))
    return found


def run(groups: Iterable[Group], done: dict[str, MeasuredRequest], one: One) -> Iterable[MeasuredRequest]:
    """Ask the groups one request at a time; a group of which an answer is missing is asked as a whole."""
    for group in groups:
        if any(ask.id not in done for ask in group):
            for ask in group:
                yield one(ask)


def together(asks: Sequence[Ask], done: dict[str, MeasuredRequest], one: One) -> list[MeasuredRequest]:
    """Ask all at once; none where all are there already."""
    if all(ask.id in done for ask in asks):
        return []
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(one, asks))


def _salt() -> str:
    return uuid.uuid4().hex
