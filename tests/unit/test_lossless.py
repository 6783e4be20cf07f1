"""Losslessness on simulated verifiers with a known truth: a Markov target and a drafter that guesses its first choice."""

import numpy as np
import pytest
import torch

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import SamplingSettings
from eagle3_lib.verdict import lossless
from eagle3_lib.verdict.rounds import Laid, lay

VOCABULARY, STEPS = 40, 4
CHAIN = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2
DRAFTER = CHAIN + torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 1.2


def accepts(verifier: str, p: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """The probability that a verifier accepts the draft after each token; the mean over the vocabulary is a correct one's."""
    correct = p[np.arange(VOCABULARY), draft]
    if verifier == "always":
        return np.ones(VOCABULARY)
    if verifier == "square":
        scales = np.linspace(1, 4, 301)
        means = [np.minimum(1, scale * correct**2).mean() for scale in scales]
        return np.minimum(1, scales[int(np.argmin(np.abs(means - correct.mean())))] * correct**2)
    if verifier == "flattened":
        return np.clip(correct.mean() + 0.4 * (correct - correct.mean()), 0, 1)
    return correct


def simulate(
    verifier: str,
    tokens: int,
    seed: int,
    temperature: float = 0.8,
    other_drafts: float = 0.0,
    rank: int = 1,
    margins: bool = False,
) -> dict:
    """Run a verifier over the chain and judge its tokens as of ``temperature``.

    other_drafts: the share of the vocabulary after which the engine drafts the drafter's choice of a rank, the replay its first
    (rank 0). margins: whether the drafter's lead is told, which is 0 there.
    """
    random = np.random.default_rng(seed)
    at = 1.2 if verifier == "temperature" else temperature
    p, q = (CHAIN / at).softmax(-1).double().numpy(), (DRAFTER / temperature).softmax(-1).double().numpy()
    replayed = DRAFTER.argmax(-1).tolist()
    differs = np.random.default_rng(0).random(VOCABULARY) < other_drafts
    choice = np.where(differs, DRAFTER.argsort(descending=True)[:, rank].numpy(), np.array(replayed))
    accept = accepts(verifier, p, choice)

    def draw(weights):
        return int(random.choice(VOCABULARY, p=weights / weights.sum()))

    text, rounds = [0, draw(p[0])], []
    while len(text) <= tokens:
        count = 0
        while count < STEPS:
            draft = int(choice[text[-1]])
            if random.random() >= accept[text[-1]]:
                weights = (q if verifier == "drafter" else p)[text[-1]].copy()
                if verifier != "including":
                    weights[draft] = 0
                text.append(draw(weights))
                break
            text.append(draft)
            count += 1
        else:
            text.append(draw(p[text[-1]]))
        rounds.append(count)
    emitted = text[1:]
    before = torch.tensor(text[:-1])
    at_steps = torch.cat([before, before[:STEPS]]).unfold(0, STEPS, 1)[
        : len(before)
    ]  # the token before each step's draft
    drafts = torch.tensor(replayed)[at_steps]
    judged = lossless.emission(
        CHAIN[before],
        emitted,
        rounds,
        drafts,
        temperature,
        drafter_logp=(DRAFTER / temperature).log_softmax(-1)[before],
        draft_margins=torch.where(torch.tensor(differs), 0, 1)[at_steps] if margins else None,
    )
    return lossless.judge(judged, temperature)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "named"),
    [
        ("always", "drafts always accepted"),
        ("including", "recovered token does not exclude the draft"),
        ("temperature", "wrong temperature"),
        ("drafter", "recovered token from the drafter"),
        ("square", "wrong verification"),
        ("flattened", "wrong verification"),
    ],
)
def test_broken_verifiers_are_named_within_2000_tokens(verifier, named):
    found = [simulate(verifier, 1900, seed)["fault"] for seed in range(5)]
    assert all(name and name.startswith(named) for name in found), found


@pytest.mark.slow
def test_correct_verifier_passes():
    judged = [simulate("correct", 600, seed) for seed in range(40)]
    assert [result["fault"] for result in judged] == [None] * 40
    z = np.array([result["tests"]["emitted"]["z"] for result in judged])
    assert abs(z.mean()) < 0.5 and 0.7 < z.std() < 1.3  # standard normal


def test_greedy_counts_near_ties():
    logits = torch.tensor([[1.0, 0.0, 0.99], [0.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    found = lossless.greedy(logits, torch.tensor([2, 1, 1]))
    assert found == {"tokens": 3, "not_first_choice": 2, "near_ties": 1, "largest_margin": 3.0}


def test_truncation_is_that_of_the_sampler():
    logp = lossless.distribution(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), 1.0, top_p=0.7, top_k=3)
    assert logp.isinf().tolist() == [[False, False, True, True]]  # 0.665 of the three, then 0.245 reaches 0.7
    torch.testing.assert_close(logp.exp().sum(), torch.tensor(1.0, dtype=torch.float64))


# ------------------------------------------------------------------------------------- drafts that are not the replay's


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_correct_verifier_of_other_drafts_is_blamed_for_nothing(share):
    for seed in range(3):
        result = simulate("correct", 1000, seed, other_drafts=share)
        assert (result["lossless"], result["fault"]) == (True, None)
        assert 0 < result["drafts_differ"]["tokens"] <= result["drafts_differ"]["of"]
        assert result["tests"].keys() == {"emitted", "not drafted"}
        assert "the engine drafts otherwise" in result["cannot_tell"][0]


@pytest.mark.parametrize("tokens", [60, 1000])
def test_drafts_that_are_never_accepted_are_no_fault_of_verification(tokens):
    result = simulate("correct", tokens, 0, other_drafts=1.0, rank=-1)
    assert result["drafts_differ"]["tokens"] == 0 and result["recovered_equal_to_draft"] > 0.05 * tokens
    assert result["fault"] is None and "or does not exclude the draft" in result["cannot_tell"][0]


def test_broken_verifier_of_other_drafts_gets_no_name_that_needs_the_drafts():
    for verifier, share, rank in (("always", 0.3, 1), ("temperature", 0.3, 1), ("temperature", 1.0, -1)):
        result = simulate(verifier, 1900, 0, other_drafts=share, rank=rank)
        assert result["fault"] == "tokens not drawn from the target's distribution (emitted)"


def test_near_ties_of_the_drafter_do_not_count_as_other_drafts():
    assert simulate("correct", 1000, 0, other_drafts=0.3)["drafts_differ"]["tokens"] > 0
    result = simulate("correct", 1000, 0, other_drafts=0.3, margins=True)
    assert result["drafts_differ"]["tokens"] == 0 and result["fault"] is None
    assert simulate("including", 1900, 0, other_drafts=0.3, margins=True)["fault"].startswith(
        "recovered token does not"
    )


# -------------------------------------------------------------------------------------------------- level and calibration


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.8, 0.15])
def test_few_tokens_and_rare_events_raise_no_alarm(temperature):
    judged = [simulate("correct", 25, seed, temperature) for seed in range(100)]
    assert [result["fault"] for result in judged] == [None] * 100


@pytest.mark.parametrize("verifier", ["square", "flattened"])
def test_acceptance_of_the_right_mean_is_judged_by_its_calibration(verifier):
    result = simulate(verifier, 1900, 1)
    assert result["tests"]["calibration"]["failed"] and not result["tests"]["acceptance"]["failed"]
    bins = result["calibration"]
    assert sum(each["drafts"] for each in bins) == result["tests"]["acceptance"]["n"]
    low, high = bins[0], bins[-1]
    steeper = high["found"] - low["found"] - (high["expected"] - low["expected"])
    assert steeper > 0.05 if verifier == "square" else steeper < -0.2
    correct = simulate("correct", 1900, 1)["calibration"]
    deviates = [
        (b["found"] - b["expected"]) / np.sqrt(b["expected"] * (1 - b["expected"]) / b["drafts"]) for b in correct
    ]
    assert np.abs(deviates).max() < 3.5


def test_too_few_tokens_are_told():
    assert any(sentence.startswith("acceptance: ") for sentence in simulate("correct", 40, 0)["cannot_tell"])
    assert simulate("correct", 1900, 0)["cannot_tell"] == []


# -------------------------------------------------------------------------------------------------------------- places


def test_roles_follow_places_and_what_each_round_drafted():
    laid = Laid(firsts=[1, 5, 7], sure=[True] * 3, idle=[4], past_end=1)
    role, step = lossless.roles(laid, [2, 1, 2], [2, 3, 4], 9)
    p, a, r, b = lossless.PLAIN, lossless.ACCEPTED, lossless.RECOVERED, lossless.BONUS
    assert role == [p, a, a, b, p, a, r, a, a]  # the last round's third token lies past the end
    assert step == [-1, 0, 1, -1, -1, 0, 1, 0, 1]


def test_tokens_around_rounds_of_uncertain_place_have_no_role():
    laid = Laid(firsts=[1, 4, 6, 8], sure=[True, False, True, False], idle=[3, 5], past_end=0)
    role, _ = lossless.roles(laid, [1, 0, 1, 0], [4] * 4, 10)
    a, r, u = lossless.ACCEPTED, lossless.RECOVERED, lossless.UNKNOWN
    assert role == [lossless.PLAIN, a, r, u, u, u, a, r, u, u]


def test_rounds_in_a_row_are_laid_as_their_counts_say():
    accepted = [0, 3, 4, 1]
    laid = lay(13, accepted)
    assert lossless.contiguous(accepted, 13) == Laid(laid.firsts, laid.sure, laid.idle)
    tokens, drafts = list(range(13)), torch.zeros(13, 4, dtype=torch.int64)
    logits = torch.randn(13, 20, generator=torch.Generator().manual_seed(0))
    of_counts = lossless.emission(logits, tokens, accepted, drafts, 1.0)
    of_places = lossless.emission(logits, tokens, laid, drafts, 1.0, accepted=accepted, drafted=[4] * 4)
    assert of_counts.role.tolist() == of_places.role.tolist()
    np.testing.assert_array_equal(of_counts.p_draft, of_places.p_draft)


def test_answers_with_steps_between_rounds_leave_accepted_counts_out():
    logits = torch.zeros(4, 5)
    laid = Laid(firsts=[1, 3], sure=[True, True], idle=[2])
    settings = SamplingSettings(temperature=1.0)
    answer = lossless.Answer([], [1, 1, 1, 1], laid, [0, 0], [4, 4], torch.ones(4, 4, dtype=torch.int64))
    emitted = lossless.emission_of(lambda rows: rows, logits, answer, settings)
    assert not emitted.counts.any() and np.isfinite(emitted.p_draft).sum() == 2
    without_rounds = lossless.emission_of(lambda rows: rows, logits, lossless.Answer([], [1, 1, 1, 1]), settings)
    assert without_rounds.role.tolist() == [lossless.PLAIN, *[lossless.UNKNOWN] * 3]
    assert lossless.judge(without_rounds, 1.0)["unplaced"] == 3


# ------------------------------------------------------------------------------------------------ the engine's sampler


SETTINGS = SamplingSettings(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.7, min_tokens=5)


def penalised(logits: list[float], prompt: list[int], output: list[int], settings: SamplingSettings) -> list[float]:
    """One position's logits, written as vLLM's definition reads."""
    result = []
    for token, logit in enumerate(logits):
        if token in prompt + output:
            logit = logit / settings.repetition_penalty if logit > 0 else logit * settings.repetition_penalty
        logit -= settings.frequency_penalty * output.count(token)
        logit -= settings.presence_penalty * (token in output)
        result.append(-np.inf if token in (0, 7) and len(output) < settings.min_tokens else logit)
    return result


def test_penalties_count_the_text_before_each_token():
    prompt, output = [3, 3, 9], [1, 2, 1, 1, 3, 8, 2, 2]
    logits = torch.randn(len(output), 12, generator=torch.Generator().manual_seed(0)) * 3
    for start in (0, 3):
        found = lossless.processed(logits[start:], SETTINGS, prompt, output, start, end_ids=[0, 7])
        expected = [penalised(logits[i].tolist(), prompt, output[:i], SETTINGS) for i in range(start, len(output))]
        torch.testing.assert_close(found, torch.tensor(expected))


def test_greedy_tokens_are_first_choices_after_penalties():
    head = torch.randn(16, 30, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    output: list[int] = []
    for row in hidden @ head:
        output.append(int(np.argmax(penalised(row.tolist(), [4], output, SETTINGS))))
    seen: list[int] = []

    def small(rows):
        seen.append(len(rows))
        return rows @ head

    answer = lossless.Answer([4], output)
    found = lossless.greedy_of(small, hidden, answer, SETTINGS, end_ids=[0, 7], rows=8)
    assert found == {"tokens": 50, "not_first_choice": 0, "near_ties": 0, "largest_margin": 0.0}
    assert max(seen) == 8
    assert lossless.greedy_of(small, hidden, answer, SamplingSettings(), rows=8)["not_first_choice"] > 5


def test_near_ties_grow_with_the_dtype_and_the_logits():
    logits, token = torch.tensor([[20.0, 19.9], [64.0, 63.97], [64.0, 63.95]]), torch.tensor([1, 1, 1])
    assert lossless.greedy(logits, token)["near_ties"] == 1  # 0.04 at 64
    assert lossless.greedy(logits, token, lossless.NEAR_TIE["bfloat16"])["near_ties"] == 3


def sampled(settings: SamplingSettings, drawn_with: SamplingSettings, tokens: int = 600) -> dict:
    """A plain engine that draws with one setting, judged as of another."""
    random, text, rows = np.random.default_rng(0), [0], []
    for _ in range(tokens):
        logits = lossless.processed(CHAIN[text[-1], None], drawn_with, [0], text[1:], len(text) - 1)
        logp = lossless.distribution(
            logits, drawn_with.temperature, drawn_with.top_p, drawn_with.top_k, drawn_with.min_p
        )
        rows.append(text[-1])
        text.append(int(random.choice(VOCABULARY, p=logp[0].exp().numpy())))
    answer = lossless.Answer([0], text[1:], lay(tokens, []))
    head = CHAIN.__getitem__
    return lossless.judge(lossless.emission_of(head, torch.tensor(rows), answer, settings), settings.temperature)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.9}, {"repetition_penalty": 1.3}],
)
def test_truncated_and_penalised_draws_pass_as_what_they_are(more):
    settings = SamplingSettings(temperature=1.1, **more)
    passed = sampled(settings, settings)
    assert passed["fault"] is None and abs(passed["best_temperature"] - 1.1) < 0.2
    plain = sampled(settings, SamplingSettings(temperature=1.1))
    assert plain["fault"].startswith(("tokens not drawn from the target's distribution", "wrong temperature"))


def test_surprisal_at_other_temperatures_is_that_of_their_distributions():
    logits = torch.randn(40, 60, generator=torch.Generator().manual_seed(0)) * 3
    for more in ({}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05, "top_p": 0.95}):
        settings = SamplingSettings(temperature=0.9, **more)
        answer = lossless.Answer([], logits.topk(2).indices[:, 1].tolist())
        found = lossless.emission_of(lambda rows: rows, logits, answer, settings)
        ids = torch.tensor(answer.output_ids)[:, None]
        for power in (1, 4, 9):
            temperature = 0.9 / (power * lossless.STEP)
            logp = lossless.distribution(logits, temperature, settings.top_p, settings.top_k, settings.min_p)
            expected = -logp.gather(1, ids)[:, 0].numpy()
            drawn = np.isfinite(expected)  # the others are out, or nearly in
            assert drawn.sum() > 10
            np.testing.assert_allclose(found.by_temperature[drawn, power - 1], expected[drawn], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.by_temperature[:, 3], found.surprisal, rtol=1e-4, atol=1e-4)


def test_moments_are_those_of_the_distribution_with_and_without_the_draft():
    logits = torch.randn(9, 30, generator=torch.Generator().manual_seed(0)) * 4
    drafts = logits.argmax(-1)[:, None]
    found = lossless.emission(logits, [2] * 9, [0] * 8, drafts, 0.7)
    logp = lossless.distribution(logits, 0.7)
    rest = logp.scatter(1, drafts, -torch.inf).log_softmax(-1)
    for prefix, some, rows in (("", logp, slice(None)), ("recovered_", rest, slice(1, None))):
        p, surprisal = some.exp(), -some.masked_fill(some.isinf(), 0)
        mean = (p * surprisal).sum(-1)
        off = surprisal - mean[:, None]
        np.testing.assert_allclose(getattr(found, f"{prefix}surprisal")[rows], -some[rows, 2], rtol=1e-4)
        for name, value in (("expected", mean), ("variance", (p * off**2).sum(-1)), ("third", (p * off**3).sum(-1))):
            np.testing.assert_allclose(getattr(found, f"{prefix}{name}")[rows], value[rows], rtol=1e-3, atol=1e-5)


def test_a_token_that_only_rounding_keeps_out_is_no_proof():
    logits = torch.tensor([[3.0, 2.0, 1.99, -1.0]])
    settings = SamplingSettings(temperature=1.0, top_k=2)
    surprisals = [
        lossless.emission_of(lambda rows: rows, logits, lossless.Answer([], [token]), settings).surprisal[0]
        for token in (1, 2, 3)
    ]
    assert np.isfinite(surprisals[:2]).all() and np.isinf(surprisals[2])


def test_rows_at_a_time_change_nothing_and_bound_what_is_held():
    logits = torch.randn(70, 50, generator=torch.Generator().manual_seed(0)) * 2
    drafter_logp = torch.randn(70, 50, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    tokens, accepted = logits.argmax(-1).tolist(), [0, 1, 2, 3] * 6 + [0] * 9
    drafts = torch.stack([torch.tensor(tokens).roll(-k) for k in range(4)], -1)
    answer = lossless.Answer([1], tokens, lay(70, accepted), accepted, None, drafts)
    held: list[int] = []

    def head(rows):
        held.append(len(rows))
        return rows

    settings = SamplingSettings(temperature=0.7, repetition_penalty=1.1)
    whole, parts = (
        lossless.emission_of(head, logits, answer, settings, (), "float32", drafter_logp.__getitem__, rows)
        for rows in (70, 9)
    )
    assert held == [70, *[9] * 7, 7]
    for name in ("role", "surprisal", "third", "p_draft", "recovered_surprisal", "drafter_surprisal", "by_temperature"):
        found, expected = getattr(parts, name), getattr(whole, name)
        if name == "role":
            assert found.tolist() == expected.tolist()
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_greedy_answers_are_no_draws():
    with pytest.raises(Eagle3Error, match="temperature: found 0"):
        lossless.emission_of(lambda rows: rows, torch.zeros(1, 3), lossless.Answer([], [0]), SamplingSettings())
