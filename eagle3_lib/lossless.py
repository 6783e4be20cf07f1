"""Losslessness: is what the engine emitted what the target itself would have emitted?

Judged from the target's logits at the emitted positions, in the replay's own forward pass. Greedy: every token is the
target's first choice, or a near tie. Sampled: a token drawn from a distribution p has a surprisal -log p(x) whose mean is
the entropy of p; over many tokens the sum of the differences, scaled by its variance, is close to normal (it is a
martingale, whatever the context was). With correct rejection sampling of a one-hot draft d (Leviathan et al. 2023,
https://arxiv.org/abs/2211.17192, as vLLM's v1/sample/rejection_sampler.py does it) a draft is accepted with
probability p(d), a rejected one is replaced by a token of p without d, renormalised, and after K accepted drafts one
more token comes from p. Each of these is tested apart.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

ALARM = 1e-3  # two-sided level of each single test; there are four, so a correct engine fails one in 0.4 % of runs
NEAR_TIE = (
    0.02  # logits: a greedy token this close below the first choice counts as a tie (float32; take 0.5 in bfloat16)
)
TEMPERATURES = np.round(np.arange(0.2, 2.01, 0.05), 2)
ACCEPTED, RECOVERED, BONUS, PLAIN = "accepted", "recovered", "bonus", "plain"


@dataclass
class Emission:
    """One entry for each emitted token. Surprisals are in nats; ``expected`` and ``variance`` are those of a correct draw.

    role: ACCEPTED, RECOVERED (after a rejected draft), BONUS (after K accepted), PLAIN (no draft). p_draft, recovered_*:
    nan where no draft stood. drafter_surprisal: under the drafter's distribution without the draft. by_temperature:
    [tokens, temperatures] surprisal at other temperatures.
    """

    role: np.ndarray
    surprisal: np.ndarray
    expected: np.ndarray
    variance: np.ndarray
    p_draft: np.ndarray
    is_draft: np.ndarray
    recovered_surprisal: np.ndarray
    recovered_expected: np.ndarray
    recovered_variance: np.ndarray
    drafter_surprisal: np.ndarray
    by_temperature: np.ndarray

    @classmethod
    def join(cls, parts: list["Emission"]) -> "Emission":
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in cls.__annotations__})


def greedy(logits: Tensor, tokens: Tensor, near_tie: float = NEAR_TIE) -> dict:
    """logits [n, V] of the positions that emitted ``tokens`` [n].

    Returns:
        {"tokens", "not_first_choice", "near_ties" (of those), "largest_margin" (logits below the first choice)}
    """
    margins = logits.max(-1).values - logits.gather(1, tokens[:, None])[:, 0]
    return {
        "tokens": len(tokens),
        "not_first_choice": int((margins > 0).sum()),
        "near_ties": int(((margins > 0) & (margins <= near_tie)).sum()),
        "largest_margin": round(float(margins.max()), 6) if len(tokens) else 0.0,
    }


def roles(rounds: list[int], steps: int, tokens: int) -> tuple[list[str], list[int]]:
    """The role of each emitted token, and the step whose draft stood at its place (-1: none).

    The first token comes from prefill; each round emits its accepted drafts and one more.
    """
    role, step = [PLAIN], [-1]
    for count in rounds:
        role += [ACCEPTED] * count + [RECOVERED if count < steps else BONUS]
        step += [*range(count), count if count < steps else -1]
    return role[:tokens], step[:tokens]


def distribution(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """log p [n, V] at a temperature, then top-k, then top-p (vLLM's order: v1/sample/sampler.py); -inf outside."""
    logp = (logits.double() / temperature).log_softmax(-1)
    if top_k:
        logp = logp.masked_fill(logp < logp.topk(top_k, -1).values[:, -1:], -torch.inf).log_softmax(-1)
    if top_p < 1:
        ordered, order = logp.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        kept = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, order, before < top_p)
        logp = logp.masked_fill(~kept, -torch.inf).log_softmax(-1)
    return logp


def _moments(logp: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy and variance of the surprisal [n] of log p [n, V]."""
    p, finite = logp.exp(), logp.masked_fill(logp.isinf(), 0)
    entropy = -(p * finite).sum(-1)
    return entropy, (p * finite**2).sum(-1) - entropy**2


def _without(logp: Tensor, ids: Tensor) -> Tensor:
    """log p without one token of each row, renormalised."""
    return logp.scatter(-1, ids[:, None], -torch.inf).log_softmax(-1)


@torch.no_grad()
def emission(
    logits: Tensor,
    tokens: list[int],
    rounds: list[int],
    drafts: Tensor,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    drafter_logp: Tensor | None = None,
) -> Emission:
    """What one request's tokens say.

    Args:
        logits: [n, V] of the target at the positions that emitted ``tokens`` (n).
        rounds: the engine's accepted counts.
        drafts: [n, K] target ids: row i, step k is the draft that stood at token i + k's place in a round that begins
            with token i; see :func:`eagle3_lib.replay.drafts`.
        drafter_logp: [n, V], optional: the drafter's distribution at the place of each token.
    """
    role, step = roles(rounds, drafts.shape[1], len(tokens))
    role, step = role + [PLAIN] * (len(tokens) - len(role)), step + [-1] * (len(tokens) - len(step))
    ids = torch.tensor(tokens, device=logits.device)
    place, steps = torch.arange(len(tokens), device=logits.device), torch.tensor(step, device=logits.device)
    has_draft = steps >= 0
    draft = torch.where(has_draft, drafts[(place - steps.clamp_min(0)).clamp_min(0), steps.clamp_min(0)], 0)

    logp = distribution(logits, temperature, top_p, top_k)
    entropy, variance = _moments(logp)
    rest = _without(logp, draft)
    rest_entropy, rest_variance = _moments(rest)
    of_drafter = torch.full_like(entropy, torch.nan)
    if drafter_logp is not None:
        of_drafter = -_pick(_without(drafter_logp.double(), draft), ids)
    nan = torch.full_like(entropy, torch.nan)
    values = {
        "surprisal": -_pick(logp, ids),
        "expected": entropy,
        "variance": variance,
        "p_draft": torch.where(has_draft, _pick(logp, draft).exp(), nan),
        "is_draft": has_draft & (draft == ids),
        "recovered_surprisal": torch.where(has_draft, -_pick(rest, ids), nan),
        "recovered_expected": torch.where(has_draft, rest_entropy, nan),
        "recovered_variance": torch.where(has_draft, rest_variance, nan),
        "drafter_surprisal": of_drafter,
        "by_temperature": torch.stack([_surprisal(logits, ids, t, top_p, top_k) for t in TEMPERATURES], -1),
    }
    return Emission(role=np.array(role), **{name: value.cpu().numpy() for name, value in values.items()})


def _surprisal(logits: Tensor, ids: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    if top_k or top_p < 1:
        return -_pick(distribution(logits, temperature, top_p, top_k), ids)
    scaled = logits / temperature
    return (scaled.logsumexp(-1) - _pick(scaled, ids)).double()


def _pick(logp: Tensor, ids: Tensor) -> Tensor:
    return logp.gather(1, ids[:, None])[:, 0]


def judge(emitted: Emission, temperature: float) -> dict:
    """Tests of a sampled run, and the name of what is wrong.

    Returns:
        {"lossless": bool, "fault": name or None, "tests": {name: {"z", "p", "n"}}, "recovered_equal_to_draft",
        "acceptance": {"expected", "found"}, "best_temperature"}. Single tests have level ALARM.
    """
    e, role = emitted, emitted.role
    recovered, drafted = role == RECOVERED, np.isfinite(emitted.p_draft)
    accepted = role[drafted] == ACCEPTED
    p = e.p_draft[drafted]
    excluding = recovered & ~e.is_draft
    tests = {
        "emitted": _z(e.surprisal, e.expected, e.variance),
        "acceptance": _z(accepted.astype(float), p, p * (1 - p)),
        "recovered": _z(
            e.recovered_surprisal[excluding], e.recovered_expected[excluding], e.recovered_variance[excluding]
        ),
        "not drafted": _z(*(values[~drafted] for values in (e.surprisal, e.expected, e.variance))),
    }
    repeated = int((recovered & e.is_draft).sum())
    total = e.by_temperature.sum(0)
    best = float(TEMPERATURES[int(np.argmin(total))])
    result = {
        "tokens": len(role),
        "tests": tests,
        "recovered_equal_to_draft": repeated,
        "acceptance": {"expected": _mean(p), "found": _mean(accepted)},
        "best_temperature": best,
    }
    result["fault"] = _name(emitted, result, float(e.surprisal.sum() - total.min()), temperature)
    return result | {"lossless": result["fault"] is None}


def _name(e: Emission, result: dict, gain: float, temperature: float) -> str | None:
    failed = {name for name, test in result["tests"].items() if test["p"] < ALARM}
    recovered = e.role == RECOVERED
    if result["acceptance"]["found"] == 1 and "acceptance" in failed:
        return "drafts always accepted"
    if recovered.any() and result["recovered_equal_to_draft"] > 0.05 * recovered.sum():
        return "recovered token does not exclude the draft"
    if not failed:
        return None
    other_temperature = abs(result["best_temperature"] - temperature) > 0.051
    if "not drafted" in failed or (
        other_temperature and gain > stats.chi2.isf(ALARM, 1) / 2 and "recovered" not in failed
    ):
        return f"wrong temperature (the tokens fit {result['best_temperature']})"
    if failed <= {"recovered", "emitted"}:
        of_drafter = e.drafter_surprisal[recovered & ~e.is_draft]
        of_target = e.recovered_surprisal[recovered & ~e.is_draft]
        if np.isfinite(of_drafter).all() and of_drafter.sum() < of_target.sum():
            return "recovered token from the drafter"
        return "recovered token drawn wrongly"
    if other_temperature and gain > stats.chi2.isf(ALARM, 1) / 2:
        return f"wrong temperature (the tokens fit {result['best_temperature']})"
    return f"wrong verification ({', '.join(sorted(failed))})"


def _z(found: np.ndarray, expected: np.ndarray, variance: np.ndarray) -> dict:
    """Two-sided z test of sums. Impossible tokens (infinite surprisal) fail it outright."""
    if not len(found):
        return {"z": 0.0, "p": 1.0, "n": 0}
    if np.isinf(found).any():
        return {"z": None, "p": 0.0, "n": len(found)}
    z = float((found - expected).sum() / np.sqrt(max(variance.sum(), 1e-12)))
    return {"z": z, "p": float(2 * stats.norm.sf(abs(z))), "n": len(found)}


def _mean(values: np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None
