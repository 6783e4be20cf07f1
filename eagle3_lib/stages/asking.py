"""What a running server is asked, and in which state: cold and warm prefix cache, long prompts, in company, some time later.

Faults of a server's state show in one of them alone (vllm#47930: acceptance falls with prefix caching). A salt separates the
prefix cache of a request from all others, so that the first ask with a new salt is cold, whatever was asked before, and a second one
right after it is warm. Requests are asked one at a time; in company only where the engine tells the rounds of each answer,
since streamed chunks tell them for one request at a time.

The long prompts stand in the middle of the short ones, so that a fault on long prompts is no fault that begins at a time.
"""

import datetime
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tqdm import tqdm

from ..results import MeasuredRequest
from ..verdict.conditions import COLD, LATE, TOGETHER, WARM

LONG_PROMPTS = 5  # asked cold and warm
LONG_TOKENS = 300  # of them at least: two cache blocks of 128 tokens, of which vLLM drops the last for EAGLE
IN_COMPANY = 4  # prompts that are asked once more, all at once


@dataclass(frozen=True)
class Ask:
    """One request.

    condition: "" where the server does not separate prefix caches. salt: see :func:`eagle3_lib.engines.base.complete`. paired: a
    request before or after it has the same salt.
    """

    id: str
    prompt_ids: list[int]
    condition: str = ""
    salt: str = ""
    paired: bool = False

    def salts(self, tries: int) -> list[str]:
        """The salt of each try: another one where the first would have filled the cache; a paired request has one try."""
        if self.paired:
            return [self.salt]
        return [f"{self.salt}.{number}" if self.salt and number else self.salt for number in range(tries)]


One = Callable[[Ask], MeasuredRequest]
Prompts = Sequence[tuple[str, list[int]]]  # (id, token ids)


def plan(prompts: Prompts, long_prompts: Prompts, in_company: bool) -> tuple[list[Ask], list[Ask]]:
    """The requests that are asked one after the other, each warm one right after its cold one, and those asked at once afterwards.

    Args:
        prompts: each asked once, cold.
        long_prompts: of :func:`lengthened`, each asked cold and then warm.
        in_company: whether some prompts are asked again together.
    """
    short = [Ask(name, ids, COLD, _salt()) for name, ids in prompts]
    pairs: list[Ask] = []
    for name, ids in long_prompts:
        salt = _salt()
        pairs += [Ask(f"{name} {state}", ids, state, salt, paired=True) for state in (COLD, WARM)]
    half = len(short) // 2
    some = prompts[:IN_COMPANY] if in_company else []
    together = [Ask(f"{name} {TOGETHER}", ids, TOGETHER, _salt()) for name, ids in some]
    return short[:half] + pairs + short[half:], together


def again(prompts: Prompts) -> list[Ask]:
    """The short prompts once more, each with a cold prefix cache, for the time after :func:`wait`."""
    return [Ask(f"{name} {LATE}", ids, LATE, _salt()) for name, ids in prompts]


def wait(until_s: float, step_s: float = 1.0) -> None:
    """Wait until a time in seconds since the epoch, with a progress bar; not where it has passed."""
    seconds = until_s - time.time()
    if seconds <= 0:
        return
    clock = datetime.datetime.fromtimestamp(until_s, datetime.UTC).strftime("%H:%M:%S")
    with tqdm(total=round(seconds), desc=f"waiting until {clock} UTC", unit="s", mininterval=2) as bar:
        while (left := until_s - time.time()) > 0:
            time.sleep(min(step_s, left))
            bar.update(round(seconds - max(until_s - time.time(), 0.0)) - bar.n)


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


def together(asks: Sequence[Ask], one: One) -> list[MeasuredRequest]:
    """Ask all at once."""
    if not asks:
        return []
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(one, asks))


def _salt() -> str:
    return uuid.uuid4().hex
