"""Are an engine's tokens the target's own? For each answer of a run, greedy or sampled, with drafts or without.

The tests are :mod:`eagle3_lib.verdict.lossless`'s; here the replay's features and drafts are brought to them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..drafter.model import Drafter
from ..params import GREEDY, SamplingSettings
from ..results import GreedyChoices, MeasuredRequest, PlainTokens
from ..targets.capture import Features, capture
from . import lossless
from .rounds import Laid

COARSEST_FIRST = ("bfloat16", "float16", "float32")
# The dtype of an engine that does not tell it: the default of vLLM and SGLang for most targets, and the one that excuses most.
UNTOLD = "bfloat16"


@dataclass(frozen=True)
class Told:
    """How a run's tokens were chosen. dtype: the coarser of engine's and replay's; end_ids: tokens that end an answer."""

    sampling: SamplingSettings = GREEDY
    dtype: str = "float32"
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Compared:
    """How one answer compares with the target: greedy tokens by their ranks, sampled ones by their probabilities."""

    greedy: GreedyChoices | None = None
    emission: lossless.Emission | None = None


def coarser(*dtypes: str) -> str:
    """The one of some types that rounds most."""
    return min(dtypes, key=COARSEST_FIRST.index)


@torch.no_grad()  # type: ignore[untyped-decorator]
def drafts_and_margins(drafter: Drafter, fused: Tensor, token_ids: list[int], steps: int) -> tuple[Tensor, Tensor]:
    """What the drafter proposes at each slot and step, the earlier steps being right.

    Args:
        fused: [T, boundaries x Ht] the target's features of the T tokens.
    Returns:
        [T-1, steps] target ids, and [T-1, steps] how far each logit lies above the second choice's.
    """
    ids = torch.tensor([token_ids], device=fused.device)
    tops = [logits[0].float().topk(2, -1) for logits in drafter.unroll(fused[None], ids, steps)]
    proposed = torch.stack([drafter.target_ids[top.indices[:, 0]] for top in tops], -1)
    return proposed, torch.stack([top.values[:, 0] - top.values[:, 1] for top in tops], -1)


def compare(
    target: Any,
    drafter: Drafter,
    request: MeasuredRequest,
    features: Features,
    laid: Laid | None,
    steps: int,
    told: Told,
) -> Compared:
    """How one answer compares with what the target would have emitted.

    Args:
        request: of benchmark.json.
        features: of its text.
        laid: places of its rounds; None where they are not known.
        steps: K.
    Returns:
        what the greedy tokens are, or what the sampled ones must have been drawn from.
    """
    start, emitted = len(request["prompt_ids"]), len(request["output_ids"])
    hidden = features.last_hidden[start - 1 : start - 1 + emitted]
    settings = told.sampling, told.end_ids, told.dtype
    if not told.sampling.temperature:
        rounds = (laid, request["accepted"], request.get("drafted")) if laid and request["accepted"] else ()
        answer = lossless.Answer(request["prompt_ids"], request["output_ids"], *rounds)
        choices = lossless.greedy_of(target.lm_head, hidden, answer, *settings)
        return Compared(choices)
    if not emitted:
        return Compared()
    proposed, margins = drafts_and_margins(
        drafter, features.fused, request["prompt_ids"] + request["output_ids"], steps
    )
    answer = lossless.Answer(
        request["prompt_ids"],
        request["output_ids"],
        laid,
        request["accepted"] or [],
        request.get("drafted"),
        *(_at_tokens(some, start, emitted) for some in (proposed, margins)),
    )
    return Compared(emission=lossless.emission_of(target.lm_head, hidden, answer, *settings))


def _at_tokens(at_slots: Tensor, prompt_length: int, emitted: int) -> Tensor:
    """Rows of slots [T-1, ...] for each emitted token [n, ...]: a round that begins with a token starts two before it.

    The first token is prefill's, so its row is never looked at; after a prompt of one token it has no slot.
    """
    from_one_before = torch.cat([at_slots[:1], at_slots])
    return from_one_before[prompt_length - 1 : prompt_length - 1 + emitted]


def plain(target: Any, boundary: int, requests: Iterable[MeasuredRequest], told: Told) -> PlainTokens:
    """How the answers of plain decoding compare with what the target would have emitted.

    Args:
        boundary: any of the drafter's; the pass over the target captures it.
    Returns:
        {"requests", "tokens", "not_greedy": tokens that are not the target's first choice, near ties left out, or None,
        "sampled": as :func:`eagle3_lib.verdict.lossless.judge`, or None}
    """
    answered = [request for request in requests if request["output_ids"]]
    settings = told.sampling, told.end_ids, told.dtype
    texts = [request["prompt_ids"] + request["output_ids"] for request in answered]
    result: PlainTokens = {
        "requests": len(answered),
        "tokens": sum(len(request["output_ids"]) for request in answered),
        "not_greedy": None,
        "sampled": None,
    }
    not_greedy, emissions = 0, []
    for request, features in zip(answered, capture(target, texts, [boundary]), strict=True):
        hidden = features.last_hidden[len(request["prompt_ids"]) - 1 : -1]
        answer = lossless.Answer(request["prompt_ids"], request["output_ids"], Laid(idle=list(range(1, len(hidden)))))
        if told.sampling.temperature:
            emissions.append(lossless.emission_of(target.lm_head, hidden, answer, *settings))
        else:
            choices = lossless.greedy_of(target.lm_head, hidden, answer, *settings)
            not_greedy += lossless.wrong(choices)
    if emissions:
        result["sampled"] = lossless.judge(lossless.Emission.join(emissions), told.sampling.temperature)
    else:
        result["not_greedy"] = not_greedy
    return result
