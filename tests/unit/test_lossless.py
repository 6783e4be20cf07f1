"""Losslessness on simulated verifiers with a known truth: a Markov target and a drafter that guesses its first choice."""

import numpy as np
import pytest
import torch

from eagle3_lib import lossless

VOCABULARY, STEPS = 40, 4
CHAIN = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2
DRAFTER = CHAIN + torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 1.2


def simulate(verifier: str, tokens: int, seed: int, temperature: float = 0.8) -> dict:
    """Run a verifier over the chain and judge its tokens as of ``temperature``."""
    random = np.random.default_rng(seed)
    at = 1.2 if verifier == "temperature" else temperature
    p, q = (CHAIN / at).softmax(-1).double().numpy(), (DRAFTER / temperature).softmax(-1).double().numpy()
    choice = DRAFTER.argmax(-1).tolist()

    def draw(weights):
        return int(random.choice(VOCABULARY, p=weights / weights.sum()))

    text, rounds = [0, draw(p[0])], []
    while len(text) <= tokens:
        count = 0
        while count < STEPS:
            draft = choice[text[-1]]
            if verifier != "always" and random.random() >= p[text[-1], draft]:
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
    chain = [before]
    for _ in range(STEPS):
        chain.append(DRAFTER.argmax(-1)[chain[-1]])
    drafts = torch.stack(chain[1:], -1)
    judged = lossless.emission(
        CHAIN[before],
        emitted,
        rounds,
        drafts,
        temperature,
        drafter_logp=(DRAFTER / temperature).log_softmax(-1)[before],
    )
    return lossless.judge(judged, temperature)


@pytest.mark.parametrize(
    ("verifier", "named"),
    [
        ("always", "drafts always accepted"),
        ("including", "recovered token does not exclude the draft"),
        ("temperature", "wrong temperature"),
        ("drafter", "recovered token from the drafter"),
    ],
)
def test_broken_verifiers_are_named_within_2000_tokens(verifier, named):
    found = [simulate(verifier, 1900, seed)["fault"] for seed in range(5)]
    assert all(name and name.startswith(named) for name in found), found


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
