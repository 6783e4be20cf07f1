"""Losslessness: is what the engine emitted what the target itself would have emitted?

Judged from the target's logits at the emitted positions, in the replay's own forward pass. Greedy: every token is the
target's first choice, or a near tie. Sampled: a token drawn from a distribution p has a surprisal -log p(x) whose mean is
the entropy of p; over many tokens the sum of the differences, scaled by its variance, is close to normal (it is a
martingale, whatever the context was). With correct rejection sampling of a one-hot draft d (Leviathan et al. 2023,
https://arxiv.org/abs/2211.17192, as vLLM's v1/sample/rejection_sampler.py does it) a draft is accepted with
probability p(d), a rejected one is replaced by a token of p without d, renormalised, and after the last accepted draft
one more token comes from p. Each of these is tested apart.

Whatever an engine drafts, correct verification emits draws from p. So the tests of all emitted tokens and of those where
no draft stood hold for any drafts; the others hold only where the engine's drafts are those of the replay. An accepted
token is the engine's draft: one that is not the replay's proves that the drafts differ, and then those tests are left out.

Logits are made and processed for a few rows at a time: nothing of the size of the vocabulary is kept for a whole answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from ..errors import Eagle3Error
from ..params import SamplingSettings
from ..results import CalibrationBin, GreedyChoices, SampledTokens, TokenTest
from .rounds import Laid

ALARM = 1e-3  # the share of correct runs in which any test fails, by Holm's method over the tests of a run
# Logits that an emitted token may lie below the first choice, by the coarser dtype of engine and replay, for a first choice
# of 32 or less; above it grows with the logit, as rounding does. Measured on the real vLLM 0.32.0 (CPU build,
# SmolLM2-135M, 1,200 greedy tokens, first choices up to 47): in bfloat16 23 tokens differ from a float32 replay, by
# 0.226 at most, and 13 from a bfloat16 replay, by 0.25 at most, which is one unit in the last place of a bfloat16 above 32.
# 0.5 is twice that. float16 has 3 bits more. In float32 no token differed; 0.02 leaves room for other kernels.
NEAR_TIE = {"float32": 0.02, "bfloat16": 0.5, "float16": 0.0625}
NEAR_TIE_UP_TO = 32.0
# Logits of the drafter from a draft to its second choice within which the engine may have drafted either. In the same runs
# with two drafters in bfloat16, of 983 accepted drafts 9 were not those of a float32 replay, and 9 replayed drafts were
# emitted in the place of a rejected one: the replay's lead was 0.162 at most. 0.4 is 2.5 times that and leaves nearly three
# drafts of four known. In float32 none of 611 differed; 0.2 % of the drafts lead by 0.001 or less.
DRAFT_NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.4, "float16": 0.05}
LOWEST = -1e4  # logits further below the first count as that far
IMPOSSIBLE = 1e6
ROWS = 32  # positions whose logits are held at a time: 0.1 to 0.35 GB in all at a vocabulary of 150,000
STEP, POWERS = 0.25, 16  # surprisals are taken at the temperatures T / (STEP x 1 .. POWERS): 4 T to T / 4
BINS = 10  # of the calibration
MOST_LOST = 0.01  # share of tokens without a certain place above which accepted counts are not tested
FEW_ACCEPTANCE, FEW_NATS = (
    0.1,
    0.25,
)  # a test that does not see a difference of the mean of this size has too few tokens
MOST_SKEWED = 1.0  # skewness of a sum up to which a gamma distribution gives its tails
MIN_VARIANCE = 5.0  # of the accepted count of a bin: bins with less are joined to the next
ACCEPTED, RECOVERED, BONUS, PLAIN, UNKNOWN = "accepted", "recovered", "bonus", "plain", "unknown"
EMITTED, ACCEPTANCE, CALIBRATION, REPLACED, FREE = "emitted", "acceptance", "calibration", "recovered", "not drafted"
SEEN = float(stats.norm.isf(ALARM / 10) + stats.norm.isf(0.1))  # deviations that one of five tests sees in 9 of 10 runs
OF_COUNTS = (ACCEPTANCE, CALIBRATION)
OF_ANY_DRAFTS = (EMITTED, FREE)  # the tests that hold whatever the engine drafts


@dataclass(frozen=True)
class Answer:
    """One request's tokens, and where drafts stood among them.

    laid: the places of the rounds (:func:`eagle3_lib.verdict.rounds.lay`), whose accepted and drafted counts go with it; None
    where the engine tells no rounds. drafted: None where each round drafted K. drafts: [n, K] target ids, n the emitted
    tokens: row i, step k is the draft that stood at token i + k's place in a round that begins with token i (see
    :func:`eagle3_lib.verdict.replay.drafts`); None where no replay knows them. draft_margins: [n, K] the drafter's logit of each
    draft above that of its second choice; None where not known.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    laid: Laid | None = None
    accepted: Sequence[int] = ()
    drafted: Sequence[int] | None = None
    drafts: Tensor | None = None
    draft_margins: Tensor | None = None


@dataclass
class Emission:
    """One entry for each emitted token. Surprisals are in nats.

    ``expected``, ``variance`` and ``third`` (central moment) of a surprisal are those of a correct draw. role: ACCEPTED,
    RECOVERED (after a rejected draft), BONUS (after all were accepted), PLAIN (no draft), UNKNOWN (no certain place).
    p_draft, recovered_*: nan where no known draft stood, recovered_* also where it was accepted. counts: whether accepted
    counts of its answer may be tested: not where steps without drafts stand between rounds, since a round that accepted
    nothing, one token like such a step, loses its place more often than others. drafter_surprisal: under the drafter's
    distribution without the draft. by_temperature: [tokens, POWERS] surprisal at other temperatures.
    """

    role: NDArray[Any]
    surprisal: NDArray[Any]
    expected: NDArray[Any]
    variance: NDArray[Any]
    third: NDArray[Any]
    p_draft: NDArray[Any]
    is_draft: NDArray[Any]
    counts: NDArray[Any]
    recovered_surprisal: NDArray[Any]
    recovered_expected: NDArray[Any]
    recovered_variance: NDArray[Any]
    recovered_third: NDArray[Any]
    drafter_surprisal: NDArray[Any]
    by_temperature: NDArray[Any]

    @classmethod
    def join(cls, parts: list["Emission"]) -> "Emission":
        return cls(
            **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)}
        )


# ------------------------------------------------------------------------------------------------------ greedy decoding


def greedy(logits: Tensor, tokens: Tensor, near_tie: float = NEAR_TIE["float32"]) -> GreedyChoices:
    """logits [n, V] of the positions that emitted ``tokens`` [n].

    Returns:
        {"tokens", "not_first_choice", "near_ties" (of those), "largest_margin" (logits below the first choice; IMPOSSIBLE
        where a forbidden token was emitted)}
    """
    first = logits.max(-1).values
    return _ties(first, first - _pick(logits, tokens), near_tie)


@torch.no_grad()  # type: ignore[untyped-decorator]
def greedy_of(
    head: Callable[[Tensor], Tensor],
    last_hidden: Tensor,
    answer: Answer,
    settings: SamplingSettings,
    end_ids: Sequence[int] = (),
    dtype: str = "float32",
    rows: int = ROWS,
) -> GreedyChoices:
    """:func:`greedy` of one answer, after penalties and ``min_tokens``.

    Args:
        head: [rows, H] to [rows, V] logits.
        last_hidden: [n, H] of the target at the positions that emitted the tokens: the prompt's last to the last but one.
        end_ids: the tokens that end an answer.
        dtype: of the engine; it decides what a near tie is.
    Returns:
        where the answer's rounds are known, also "accepted" and "own": [tokens, those that are neither the first choice nor a
        near tie], of accepted drafts, and of tokens that the target chose itself.
    """
    firsts, margins = [torch.empty(0)], [torch.empty(0)]
    for start in range(0, len(answer.output_ids), rows):
        ids = torch.tensor(answer.output_ids[start : start + rows], device=last_hidden.device)
        raw = head(last_hidden[start : start + rows]).float()
        logits = processed(raw, settings, answer.prompt_ids, answer.output_ids, start, end_ids)
        first = logits.max(-1).values
        firsts.append(first.cpu())
        margins.append((first - _pick(logits, ids)).cpu())
    first, margin = torch.cat(firsts), torch.cat(margins)
    found = _ties(first, margin, NEAR_TIE[dtype])
    if answer.laid is None:
        return found
    refused = (margin > _allowed(first, NEAR_TIE[dtype])).numpy()
    drafted = answer.drafted or [max(answer.accepted, default=0) + 1] * len(answer.accepted)
    role = np.array(roles(answer.laid, answer.accepted, drafted, len(refused))[0], str)
    parts = {"accepted": role == ACCEPTED, "own": np.isin(role, (RECOVERED, BONUS, PLAIN))}
    found["accepted"], found["own"] = ([int(part.sum()), int(refused[part].sum())] for part in parts.values())
    return found


def wrong(choices: GreedyChoices) -> int:
    """Tokens that are not the target's first choice, near ties left out."""
    return choices["not_first_choice"] - choices["near_ties"]


def _allowed(first: Tensor, near_tie: float) -> Tensor:
    """How far below a first choice [n] a token may lie."""
    return near_tie * (first.abs() / NEAR_TIE_UP_TO).clamp_min(1)


def _ties(first: Tensor, margins: Tensor, near_tie: float) -> GreedyChoices:
    allowed = _allowed(first, near_tie)
    return {
        "tokens": len(margins),
        "not_first_choice": int((margins > 0).sum()),
        "near_ties": int(((margins > 0) & (margins <= allowed)).sum()),
        "largest_margin": round(min(float(margins.max()), IMPOSSIBLE), 6) if len(margins) else 0.0,
    }


# --------------------------------------------------------------------------------------- the distribution of the engine


def processed(
    logits: Tensor,
    settings: SamplingSettings,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    start: int,
    end_ids: Sequence[int] = (),
) -> Tensor:
    """What changes the first choice: penalties and ``min_tokens``, as vLLM 0.32.0 computes them.

    Read in vllm/model_executor/layers/utils.py (apply_penalties), vllm/_custom_ops.py (apply_repetition_penalties_torch)
    and vllm/v1/sample/logits_processor/builtin.py (MinTokensLogitsProcessor): logits of the tokens of prompt and output
    so far are divided by the repetition penalty where positive, else multiplied; then each token of the output so far
    loses the frequency penalty times its count, and the presence penalty once; end tokens are impossible before
    ``min_tokens``. (The plain sampler forbids end tokens first, the rejection sampler last: the result is the same.)

    Args:
        logits: [rows, V], of the tokens ``output_ids[start]`` and on.
        prompt_ids, output_ids: the whole answer's.
    Returns:
        [rows, V].
    """
    rows, vocabulary = logits.shape
    device = logits.device
    if settings.repetition_penalty != 1 or settings.frequency_penalty or settings.presence_penalty:
        so_far = torch.tensor(output_ids[:start], dtype=torch.int64, device=device)
        counts = torch.bincount(so_far, minlength=vocabulary).to(logits.dtype).repeat(rows, 1)
        for row, token in enumerate(output_ids[start : start + rows - 1], start=1):
            counts[row:, token] += 1
        seen = counts > 0
        seen[:, torch.tensor(prompt_ids, dtype=torch.int64, device=device)] = True
        penalty = settings.repetition_penalty
        repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, repeated, logits)
        logits = logits - settings.frequency_penalty * counts - settings.presence_penalty * (counts > 0)
    too_short = min(max(settings.min_tokens - start, 0), rows)
    if too_short and end_ids:
        logits = logits.clone()
        logits[:too_short, list(end_ids)] = -torch.inf
    return logits


def distribution(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Tensor:
    """log p [n, V]: temperature, then min_p, top_k, top_p, as in vLLM 0.32.0; -inf outside.

    Read in vllm/v1/sample/sampler.py (Sampler.sample), logits_processor/builtin.py (MinPLogitsProcessor: out go tokens below
    min_p times the largest p) and ops/topk_topp_sampler.py (apply_top_k_top_p_pytorch: out go logits below the k-th, then
    tokens before which the likelier ones make up top_p of what is left). With speculation vLLM refuses min_p
    (vllm/sampling_params.py, _validate_spec_decode).
    """
    settings = SamplingSettings(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    values, ids = _candidates(logits, settings)
    scaled = values.double() / temperature
    if ids is None:
        return scaled.log_softmax(-1)
    scaled -= scaled[:, :1].clone()
    logp = scaled.masked_fill(
        ~_within(_reach(scaled, scaled.exp().cumsum(-1), settings), scaled), -torch.inf
    ).log_softmax(-1)
    return torch.full(logits.shape, -torch.inf, dtype=logp.dtype, device=logp.device).scatter(-1, ids, logp)


def _candidates(logits: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor | None]:
    """The logits [n, C] that may be drawn, in falling order, and their ids; without truncation all, in their own order.

    With top_k these are some more than k, for ties and for tokens that only rounding keeps out.
    """
    if not settings.top_k and settings.top_p == 1 and not settings.min_p:
        return logits, None
    if settings.top_k:
        values, ids = logits.topk(min(settings.top_k + 64, logits.shape[-1]), -1)
    else:
        values, ids = logits.sort(-1, descending=True)
    return values, ids


def _reach(scaled: Tensor, mass: Tensor, settings: SamplingSettings, tolerance: float = 0.0) -> Tensor:
    """How many candidates [n] truncation keeps.

    Args:
        scaled: [n, C] logit / temperature below the first, falling from 0.
        mass: [n, C] sums of exp(scaled) up to each candidate.
        tolerance: keep also what an engine may keep whose scaled logits are that much off.
    """
    reach = torch.full_like(scaled[:, :1], scaled.shape[-1], dtype=torch.int64)
    if settings.min_p or settings.top_k:
        last = min(settings.top_k or scaled.shape[-1], scaled.shape[-1]) - 1
        lowest = scaled[:, last, None].clamp_min(float(np.log(settings.min_p)) if settings.min_p else LOWEST)
        reach = torch.searchsorted(-scaled, tolerance - lowest, right=True)
    if settings.top_p < 1:
        odds = settings.top_p / (1 - settings.top_p) * float(np.exp(tolerance))
        enough = mass.gather(1, reach - 1) * (odds / (1 + odds))
        reach = reach.minimum(torch.searchsorted(mass, enough) + 1)
    return reach[:, 0]


def _within(reach: Tensor, candidates: Tensor) -> Tensor:
    return torch.arange(candidates.shape[-1], device=reach.device) < reach[:, None]


# ------------------------------------------------------------------------------------------------------ places of drafts


def roles(laid: Laid, accepted: Sequence[int], drafted: Sequence[int], tokens: int) -> tuple[list[str], list[int]]:
    """The role of each emitted token, and the step whose draft stood at its place (-1: none or unknown).

    The first token comes from prefill. A round emits its accepted drafts and one more token; what of it lies past the
    answer's end does not exist. Between two rounds of certain place, or a round and an end, all places are uncertain where
    that of any round is.
    """
    role, step = [UNKNOWN] * tokens, [-1] * tokens
    role[:1] = [PLAIN] * min(tokens, 1)
    for index in laid.idle:
        role[index] = PLAIN
    certain = 1  # tokens before this one have certain places
    doubt = False
    for first, sure, count, asked in zip(laid.firsts, laid.sure, accepted, drafted, strict=True):
        if not sure:
            doubt = True
            continue
        if doubt:
            role[certain:first] = [UNKNOWN] * (min(first, tokens) - certain)
        of_round = [ACCEPTED] * count + [RECOVERED if count < asked else BONUS]
        steps = [*range(count), count if count < asked else -1]
        end = min(first + count + 1, tokens)
        role[first:end], step[first:end] = of_round[: end - first], steps[: end - first]
        certain, doubt = end, False
    if doubt:
        role[certain:] = [UNKNOWN] * (tokens - certain)
    return role, step


def contiguous(accepted: Sequence[int], tokens: int) -> Laid:
    """Rounds that follow one another from the second token on, as far as the answer has tokens; then steps without drafts."""
    firsts, first = [], 1
    for count in accepted:
        firsts.append(first)
        first += count + 1
    inside = [first for first in firsts if first < tokens]
    return Laid(firsts=inside, sure=[True] * len(inside), idle=list(range(first, tokens)))


# ------------------------------------------------------------------------------------------------ what the tokens say


def emission(
    logits: Tensor,
    tokens: list[int],
    rounds: Laid | Sequence[int],
    drafts: Tensor,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    drafter_logp: Tensor | None = None,
    accepted: Sequence[int] = (),
    drafted: Sequence[int] | None = None,
    draft_margins: Tensor | None = None,
    near_tie: float = DRAFT_NEAR_TIE["float32"],
) -> Emission:
    """:func:`emission_of` of logits [n, V] that are there already.

    Args:
        rounds: the engine's accepted counts, of rounds that follow one another; or their places, with ``accepted``.
        drafter_logp: [n, V], optional: the drafter's distribution at the place of each token.
        near_tie: see :data:`DRAFT_NEAR_TIE`.
    """
    if not isinstance(rounds, Laid):
        laid = contiguous(rounds, len(tokens))
        accepted = list(rounds)[: len(laid.firsts)]
    else:
        laid = rounds
    answer = Answer([], tokens, laid, accepted, drafted, drafts, draft_margins)
    settings = SamplingSettings(temperature=temperature, top_p=top_p, top_k=top_k)
    of_slice = None if drafter_logp is None else drafter_logp.__getitem__
    return _emission(lambda rows: rows, logits, answer, settings, (), NEAR_TIE["float32"], near_tie, of_slice, ROWS)


def emission_of(
    head: Callable[[Tensor], Tensor],
    last_hidden: Tensor,
    answer: Answer,
    settings: SamplingSettings,
    end_ids: Sequence[int] = (),
    dtype: str = "float32",
    drafter_logp: Callable[[slice], Tensor] | None = None,
    rows: int = ROWS,
) -> Emission:
    """What one sampled answer says, for :func:`judge`.

    Args:
        head: [rows, H] to [rows, V] logits.
        last_hidden: [n, H] of the target at the positions that emitted the tokens: the prompt's last to the last but one.
        settings: with a temperature above 0.
        end_ids: the tokens that end an answer.
        dtype: of the engine; it decides what a near tie is.
        drafter_logp: gives, for a slice of the tokens, [rows, V] the drafter's log distribution at their places.
    Raises:
        Eagle3Error: the temperature is 0.
    """
    if not settings.temperature:
        raise Eagle3Error("temperature: found 0, expected more: greedy tokens are no draws; see lossless.greedy_of")
    ties = NEAR_TIE[dtype], DRAFT_NEAR_TIE[dtype]
    return _emission(head, last_hidden, answer, settings, end_ids, *ties, drafter_logp, rows)


def _emission(
    head: Callable[[Tensor], Tensor],
    last_hidden: Tensor,
    answer: Answer,
    settings: SamplingSettings,
    end_ids: Sequence[int],
    near_tie: float,
    draft_near_tie: float,
    drafter_logp: Callable[[slice], Tensor] | None,
    rows: int,
) -> Emission:
    role, drafts = _known_drafts(answer, draft_near_tie)
    parts = []
    with torch.no_grad():
        for start in range(0, len(role), rows):
            some = slice(start, start + rows)
            raw = head(last_hidden[some]).float()
            logits = processed(raw, settings, answer.prompt_ids, answer.output_ids, start, end_ids)
            ids = torch.tensor(answer.output_ids[some], device=logits.device)
            draft = drafts[some].to(logits.device)
            values = _values(logits, ids, draft, role[some] == RECOVERED, settings, near_tie)
            of_drafter = torch.full_like(values["surprisal"], torch.nan)
            if drafter_logp is not None:
                logp = drafter_logp(some).double()
                of_drafter = -_pick(logp.scatter(-1, draft.clamp_min(0)[:, None], -torch.inf).log_softmax(-1), ids)
            values["drafter_surprisal"] = of_drafter
            parts.append({name: value.cpu().numpy() for name, value in values.items()})
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    counts = answer.laid is not None and not answer.laid.idle
    return Emission(role=role, counts=np.full(len(role), counts), **joined)


def _known_drafts(answer: Answer, near_tie: float) -> tuple[NDArray[Any], Tensor]:
    """Roles [n], and the replayed draft [n] at each token's place: -1 where none stood or none is known for certain."""
    tokens = len(answer.output_ids)
    drafts = torch.full((tokens,), -1)
    if answer.laid is None:
        return np.array([PLAIN, *[UNKNOWN] * (tokens - 1)][:tokens]), drafts
    steps = 0 if answer.drafts is None else answer.drafts.shape[1]
    drafted = answer.drafted
    if drafted is None:
        drafted = [steps] * len(answer.accepted)
    role, step = roles(answer.laid, answer.accepted, drafted, tokens)
    if answer.drafts is None:
        return np.array(role), drafts
    at = [(place, k) for place, k in enumerate(step) if 0 <= k < steps]
    if at:
        places, ks = torch.tensor(at, device=answer.drafts.device).unbind(-1)
        known = answer.drafts[places - ks, ks]
        if answer.draft_margins is not None:
            known = known.masked_fill(answer.draft_margins[places - ks, ks] <= near_tie, -1)
        drafts[places.cpu()] = known.cpu()
    return np.array(role), drafts


def _values(
    logits: Tensor, ids: Tensor, draft: Tensor, is_recovered: NDArray[Any], settings: SamplingSettings, near_tie: float
) -> dict[str, Tensor]:
    """The fields of :class:`Emission` that the target's logits [rows, V] give.

    A token that truncation keeps out by no more than a near tie counts as if it were kept, and a draft that only this makes
    possible, or not certain, as not known: there an engine's rounding decides.
    """
    inverse = 1 / settings.temperature
    values, among = _candidates(logits, settings)
    token, drafted = _column(among, ids), _column(among, draft)
    below = (values - values.max(-1, keepdim=True).values).clamp_min_(LOWEST)
    scaled = below * inverse
    weights = scaled.exp()
    exists, has_draft = (token >= 0) & (_pick(values, token) > -torch.inf), draft >= 0
    possible = exists
    of_draft = _pick(weights, drafted).double()
    if among is not None:
        mass = weights.cumsum(-1, dtype=torch.float64)
        reach, may_reach = (_reach(scaled, mass, settings, tolerance) for tolerance in (0.0, near_tie * inverse))
        weights = weights * _within(reach, weights)
        possible = exists & (token < may_reach)
        p_possible = of_draft * (drafted < may_reach) / mass.gather(1, may_reach[:, None] - 1)[:, 0]
        of_draft = of_draft * (drafted < reach)
    powers = torch.stack([of_draft * _pick(scaled, drafted).double() ** power for power in range(4)])
    at = drafted >= 0
    weights[at, drafted[at]] = 0  # summed apart: what is left of a sure draft is small
    rest = _power_sums(weights, scaled)
    sums = rest + powers
    log_total, expected, variance, third = _moments(sums)
    own = _pick(scaled, token).double()

    p_draft = of_draft / sums[0]
    if among is not None:
        has_draft &= _is_certain(p_draft) == _is_certain(p_possible)
    is_draft = has_draft & (draft == ids)
    replaces = has_draft & torch.as_tensor(is_recovered, device=logits.device)
    replaceable = rest[0] > 0
    log_rest, *moments = _moments(rest.where(replaceable, 1))
    recovered = [(log_rest - own).masked_fill(is_draft | ~(replaceable & possible), torch.inf), *moments]
    names = ("surprisal", "expected", "variance", "third")
    nan = torch.full_like(own, torch.nan)
    return {
        "surprisal": (log_total - own).masked_fill(~possible, torch.inf),
        "expected": expected,
        "variance": variance,
        "third": third,
        "p_draft": torch.where(has_draft, p_draft, nan),
        "is_draft": is_draft,
        "by_temperature": _by_temperature(below, token, exists, settings, among is not None, near_tie),
        **{
            f"recovered_{name}": torch.where(replaces, value, nan) for name, value in zip(names, recovered, strict=True)
        },
    }


def _is_certain(p: Tensor) -> Tensor:
    """Whether a probability is 0 or 1."""
    return (p <= 0) | (p >= 1 - 1e-12)


def _power_sums(weights: Tensor, scaled: Tensor) -> Tensor:
    """[4, n] sums of weight x scaled ** (0, 1, 2, 3)."""
    sums = [weights.sum(-1)]
    for _ in range(3):
        weights = weights * scaled
        sums.append(weights.sum(-1))
    return torch.stack(sums).double()


def _moments(sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of :func:`_power_sums`: log of the sum of weights, and mean, variance and third central moment of the surprisal."""
    log_total = sums[0].log()
    mean, square, cube = sums[1:] / sums[0]
    variance = (square - mean**2).clamp_min(0)
    return log_total, log_total - mean, variance, -(cube - 3 * mean * variance - mean**3)


def _by_temperature(
    below: Tensor, token: Tensor, exists: Tensor, settings: SamplingSettings, truncated: bool, near_tie: float
) -> Tensor:
    """[rows, POWERS] surprisal at inverse temperatures of 1 .. POWERS times STEP / T, of logits below the first [rows, C].

    One exponential; the others are its powers.
    """
    unit = (below * (STEP / settings.temperature)).exp()
    own = _pick(below, token).double()
    weights = torch.ones_like(unit)
    surprisals = []
    for power in range(1, POWERS + 1):
        weights *= unit
        inverse = power * STEP / settings.temperature
        drawn = exists
        if truncated:
            scaled = below * inverse
            mass = weights.cumsum(-1)
            total = mass.gather(1, _reach(scaled, mass, settings)[:, None] - 1)[:, 0]
            drawn = drawn & (token < _reach(scaled, mass, settings, near_tie * inverse))
        else:
            total = weights.sum(-1)
        surprisals.append((total.double().log() - own * inverse).masked_fill(~drawn, torch.inf))
    return torch.stack(surprisals, -1)


def _column(among: Tensor | None, ids: Tensor) -> Tensor:
    """Where ids [n] stand among the candidates [n, C]; -1: nowhere."""
    if among is None:
        return ids
    match = among == ids[:, None]
    return torch.where(match.any(-1), match.int().argmax(-1), -1)


def _pick(values: Tensor, columns: Tensor) -> Tensor:
    """values [n, C] at columns [n]; 0 where the column is -1."""
    return values.gather(1, columns.clamp_min(0)[:, None])[:, 0].masked_fill(columns < 0, 0)


# ---------------------------------------------------------------------------------------------------------------- verdict


def judge(emitted: Emission, temperature: float) -> SampledTokens:
    """Tests of a sampled run, and the name of what is wrong.

    Returns:
        {"lossless": bool, "fault": name or None, "tokens", "unplaced": tokens of role UNKNOWN,
        "tests": {name: {"z", "p", "n", "failed", "sees": the difference of the mean, in nats or as a share of drafts, that
        would fail it in 9 of 10 runs}},
        "drafts_differ": {"tokens": accepted tokens that are not the replay's draft, "of": accepted tokens with a known draft},
        "recovered_equal_to_draft", "acceptance": {"expected", "found"} of the replay's drafts,
        "calibration": [{"low", "high", "drafts", "expected", "found"}], "best_temperature", "cannot_tell": [sentences]}.
        Where the drafts differ, tests that depend on them are left out.
    """
    e = emitted
    known = np.isfinite(e.p_draft)
    accepted, recovered = known & (e.role == ACCEPTED), known & (e.role == RECOVERED)
    counted = known & e.counts
    p, was_accepted = e.p_draft[counted], accepted[counted]
    bins = _bins(p, was_accepted)
    tests = _tests(e, p, was_accepted, recovered & ~e.is_draft)
    lost = e.counts & (e.role == UNKNOWN)
    if lost.sum() > MOST_LOST * e.counts.sum():
        tests = {name: test for name, test in tests.items() if name not in OF_COUNTS}
    differing = int((accepted & ~e.is_draft).sum())
    repeated = int((recovered & e.is_draft).sum())
    result: SampledTokens = {
        "lossless": True,
        "fault": None,
        "tokens": len(e.role),
        "unplaced": int((e.role == UNKNOWN).sum()),
        "tests": tests,
        "drafts_differ": {"tokens": differing, "of": int(accepted.sum())},
        "recovered_equal_to_draft": repeated,
        "acceptance": {"expected": _mean(p), "found": _mean(was_accepted)},
        "calibration": bins,
        "best_temperature": temperature,
        "cannot_tell": [],
    }
    failed = _holm(tests)
    includes = not differing and _includes_draft(repeated, e.p_draft[recovered], tests, failed)
    doubtful = bool(repeated) and not includes and (ACCEPTANCE in failed or repeated > 0.05 * recovered.sum())
    if differing or doubtful:
        tests = {name: test for name, test in tests.items() if name in OF_ANY_DRAFTS}
        failed = _holm(tests)
    for name, test in tests.items():
        test["failed"] = name in failed
    best, gain = _best_temperature(e, temperature)
    result["tests"], result["best_temperature"] = tests, best
    result["fault"] = _name(e, result, failed, includes, gain, temperature)
    result["lossless"] = result["fault"] is None
    result["cannot_tell"] = _cannot_tell(result, doubtful, bool(known.any()))
    return result


def _tests(e: Emission, p: NDArray[Any], accepted: NDArray[Any], replaced: NDArray[Any]) -> dict[str, TokenTest]:
    free = np.isin(e.role, (BONUS, PLAIN))
    impossible = (accepted & (p <= 0)) | (~accepted & (p >= 1))
    found = np.where(impossible, np.inf, accepted)
    surprisals = (e.surprisal, e.expected, e.variance, e.third)
    of_recovered = (e.recovered_surprisal, e.recovered_expected, e.recovered_variance, e.recovered_third)
    tests = {
        EMITTED: _z(*surprisals),
        ACCEPTANCE: _z(found, p, p * (1 - p), p * (1 - p) * (1 - 2 * p)),
        REPLACED: _z(*(values[replaced] for values in of_recovered)),
        FREE: _z(*(values[free] for values in surprisals)),
    }
    return tests | {CALIBRATION: _chi_square(p, accepted)}


def _holm(tests: dict[str, TokenTest]) -> set[str]:
    """The tests that fail at the level ALARM of all together (Holm 1979, Scandinavian Journal of Statistics 6, 65-70)."""
    made = sorted((name for name in tests if tests[name]["n"]), key=lambda name: tests[name]["p"])
    failed = set()
    for index, name in enumerate(made):
        if tests[name]["p"] >= ALARM / (len(made) - index):
            break
        failed.add(name)
    return failed


def _z(found: NDArray[Any], expected: NDArray[Any], variance: NDArray[Any], third: NDArray[Any]) -> TokenTest:
    """Two-sided test of a sum, by the tails of a gamma distribution with the sum's variance and skewness.

    With a normal distribution's tails few tokens, or rare events, would raise false alarms; a sum that is more skewed than
    MOST_SKEWED, made of hardly any events, is judged by Cantelli's inequality, which holds for any distribution. Impossible
    tokens (infinite surprisal) fail the test outright.
    """
    if not len(found):
        return {"z": 0.0, "p": 1.0, "n": 0, "sees": None}
    spread = np.sqrt(max(variance.sum(), 1e-12))
    sees = float(SEEN * spread / len(found))
    if np.isinf(found).any():
        return {"z": None, "p": 0.0, "n": len(found), "sees": sees}
    z = float((found - expected).sum() / spread)
    skew = third.sum() / spread**3
    tail = 1 / (1 + z**2)
    if abs(skew) <= MOST_SKEWED:
        tail = min(stats.pearson3.sf(z, skew), stats.pearson3.cdf(z, skew))
    return {"z": z, "p": float(min(1, 2 * tail)), "n": len(found), "sees": sees}


def _chi_square(p: NDArray[Any], accepted: NDArray[Any]) -> TokenTest:
    """Whether drafts of each predicted probability are accepted that often: chi-square over bins of p.

    Bins are joined upwards until the accepted count of each has a variance of MIN_VARIANCE at least; z is the normal
    deviate of the same p. Without two bins there is no test (n 0).
    """
    order = np.argsort(p, kind="stable")
    p, accepted = p[order], accepted[order]
    variance = p * (1 - p)
    edges = np.searchsorted(p, np.arange(1, BINS) / BINS)
    deviates, start = [], 0
    for end in [*edges, len(p)]:
        if variance[start:end].sum() >= MIN_VARIANCE and (end == len(p) or variance[end:].sum() >= MIN_VARIANCE):
            deviates.append((accepted[start:end].sum() - p[start:end].sum()) / np.sqrt(variance[start:end].sum()))
            start = end
    if len(deviates) < 2:
        return {"z": 0.0, "p": 1.0, "n": 0, "sees": None}
    level = float(stats.chi2.sf(np.square(deviates).sum(), len(deviates)))
    return {"z": float(stats.norm.isf(level / 2)) if level else None, "p": level, "n": len(p), "sees": None}


def _bins(p: NDArray[Any], accepted: NDArray[Any]) -> list[CalibrationBin]:
    """Predicted and found acceptance by predicted probability, for a figure."""
    at = np.minimum((p * BINS).astype(int), BINS - 1)
    return [
        {
            "low": index / BINS,
            "high": (index + 1) / BINS,
            "drafts": int((at == index).sum()),
            "expected": _mean(p[at == index]),
            "found": _mean(accepted[at == index]),
        }
        for index in range(BINS)
        if (at == index).any()
    ]


def _includes_draft(repeated: int, p_draft: NDArray[Any], tests: dict[str, TokenTest], failed: set[str]) -> bool:
    """Whether recovered tokens that equal the replayed draft come from a verifier that leaves the draft in.

    An engine that drafts otherwise gives such tokens too, from a correct verifier: there a draft is accepted less often than
    the replay's would be, and replayed drafts are emitted in its place as often as they are likely.

    Args:
        repeated: such tokens.
        p_draft: of the replayed draft at each recovered token.
    """
    if repeated <= max(4, 0.05 * len(p_draft)):
        return False
    acceptance, emitted = tests.get(ACCEPTANCE, {"n": 0}), tests[EMITTED]["z"]
    accepted = acceptance["z"] if acceptance["n"] and acceptance["z"] is not None else -np.inf
    if EMITTED not in failed:
        return accepted > -1.6 and repeated > p_draft.sum() / 2
    excess = (repeated - p_draft.sum()) / np.sqrt((p_draft * (1 - p_draft)).sum() + 1)
    return accepted > -3 or (excess > 4 and (emitted is None or emitted > 0))


def _best_temperature(e: Emission, temperature: float) -> tuple[float, float]:
    """The temperature under which the tokens are likeliest, and how many nats likelier than under ``temperature``.

    Between the temperatures of ``by_temperature`` a parabola in 1 / T is laid through the best and its neighbours.
    """
    total = e.by_temperature.sum(0)
    declared = round(1 / STEP) - 1
    if not np.isfinite(total).any():
        return temperature, 0.0
    best = int(np.argmin(total))
    power, gain = best + 1.0, float(total[declared] - total[best])
    if 0 < best < POWERS - 1 and np.isfinite(total[best - 1 : best + 2]).all():
        before, at, after = total[best - 1 : best + 2]
        curvature = before - 2 * at + after
        if curvature > 0:
            power += float((before - after) / (2 * curvature))
            gain += float((before - after) ** 2 / (8 * curvature))
    return round(temperature / (STEP * power), 2), gain


def _name(
    e: Emission, result: SampledTokens, failed: set[str], includes: bool, gain: float, temperature: float
) -> str | None:
    tests, best = result["tests"], result["best_temperature"]
    if result["acceptance"]["found"] == 1 and ACCEPTANCE in failed:
        return "drafts always accepted"
    if includes:
        return "recovered token does not exclude the draft"
    if not failed:
        return None
    of_drafts = ACCEPTANCE in tests and tests[ACCEPTANCE]["n"] > 0
    if REPLACED in failed and failed <= {REPLACED, EMITTED} and of_drafts:
        replaced = (e.role == RECOVERED) & np.isfinite(e.p_draft) & ~e.is_draft
        of_drafter, of_target = e.drafter_surprisal[replaced], e.recovered_surprisal[replaced]
        if np.isfinite(of_drafter).all() and of_drafter.sum() < of_target.sum():
            return "recovered token from the drafter"
        return "recovered token drawn wrongly"
    fits_another = abs(best / temperature - 1) > 0.06 and gain > stats.chi2.isf(ALARM, 1) / 2
    if fits_another and _everywhere(e, tests):
        return f"wrong temperature (the tokens fit {best})"
    if of_drafts and FREE not in failed:
        return f"wrong verification ({', '.join(sorted(failed))})"
    return f"tokens not drawn from the target's distribution ({', '.join(sorted(failed))})"


def _everywhere(e: Emission, tests: dict[str, TokenTest]) -> bool:
    """Whether recovered tokens, and those where no draft stood, are as surprising as all are, too much or too little.

    So it is with a wrong temperature, while what an engine does wrongly with drafts leaves these tokens alone. Tests that
    would not see the difference do not count; without any that does, there is no telling.
    """
    shift = float((e.surprisal - e.expected).mean())
    told = [
        tests[name]
        for name in (REPLACED, FREE)
        if name in tests and tests[name]["n"] and (tests[name]["sees"] or 0.0) < abs(shift)
    ]
    return bool(told) and all(test["z"] is None or test["z"] * np.sign(shift) > 2.6 for test in told)


def _cannot_tell(result: SampledTokens, doubtful: bool, drafted: bool) -> list[str]:
    tests, differ, unplaced = result["tests"], result["drafts_differ"], result["unplaced"]
    sentences = []
    if differ["tokens"]:
        sentences.append(
            f"what verification does with drafts: {differ['tokens']} of {differ['of']} accepted tokens are not the replay's "
            "drafts, so the engine drafts otherwise"
        )
    elif doubtful:
        sentences.append(
            f"what verification does with drafts: {result['recovered_equal_to_draft']} recovered tokens are the replay's drafts, "
            "so the engine drafts otherwise, or does not exclude the draft"
        )
    if unplaced:
        sentences.append(f"{unplaced} of {result['tokens']} tokens have no certain place in a round")
    needed = {EMITTED: FEW_NATS}
    needed |= {FREE: FEW_NATS} if REPLACED not in tests else {}
    needed |= {ACCEPTANCE: FEW_ACCEPTANCE, REPLACED: FEW_NATS} if drafted else {}
    for name, few in needed.items():
        test = tests.get(name)
        if test is None:
            continue
        if not test["n"]:
            sentences.append(f"{name}: no tokens")
        elif not test["failed"] and (sees := test["sees"] or 0.0) > few:
            unit = "points" if name == ACCEPTANCE else "nats"
            size = 100 * sees if name == ACCEPTANCE else sees
            sentences.append(f"{name}: {test['n']} tokens do not show a difference below {size:.2g} {unit}")
    return sentences


def _mean(values: NDArray[Any]) -> float | None:
    return float(np.mean(values)) if len(values) else None
