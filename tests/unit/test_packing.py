"""Packing: what each position teaches, the division over passes and processes, and reading ahead."""

import time

import pytest
import torch

from eagle3_lib.features.store import Sample
from eagle3_lib.targets.capture import Features
from eagle3_lib.training import packing

TARGET_IDS = torch.arange(0, 40, 2)  # the draft vocabulary: even tokens


def make_sample(tokens, prompt_length, argmax):
    features = Features(torch.full((tokens, 6), float(tokens)), torch.arange(tokens * 3.0).view(tokens, 3), argmax)
    return Sample(f"s{tokens}", "train", prompt_length, list(range(tokens)), features)


def test_positions_teach_the_slots_before_them():
    first = make_sample(4, 2, torch.tensor([2, 4, 7, 6]))  # position 2's likeliest token is odd: out of the vocabulary
    second = make_sample(3, 3, torch.tensor([0, 0, 8]))
    made = packing.pack([first, second], TARGET_IDS, 3)
    assert made.documents.lengths == (4, 3) and made.tokens == 7
    assert made.token_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert made.fused[0, :, 0].tolist() == [4.0] * 4 + [3.0] * 3
    labels = made.labels
    assert labels.likeliest.tolist() == [2, 3, 4]  # draft ids of 4, 6 and 8, at places 1, 3 and 4 + 2
    assert labels.last_hidden[:, 0].tolist() == [3.0, 9.0, 6.0]
    assert labels.slots.tolist() == [[0, 2, 5], [-1, 1, 4], [-2, 0, 3]]
    assert labels.inside.tolist() == [[True, True, True], [False, True, True], [False, True, False]]
    assert labels.counted.tolist() == [4, 3, 1] and labels.taught.tolist() == [3, 2, 1]


def test_an_idle_pass_teaches_nothing():
    labels = packing.pack([make_sample(4, 2, torch.zeros(4))], TARGET_IDS, 2, teaches=False).labels
    assert labels.slots.shape == (2, 0) and labels.counted.tolist() == labels.taught.tolist() == [0, 0]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_division_holds_every_sample_once_within_the_limit(processes):
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 7, 40):
        lengths = torch.randint(1, 100, (count,), generator=generator).tolist()
        for limit in (60, 150, 10**6):
            passes = packing.divide(lengths, limit, processes)
            assert sorted(number for some in passes for number in some) == list(range(count))
            assert len(passes) % processes == 0
            assert all(sum(lengths[i] for i in some) <= limit or len(some) == 1 for some in passes)


def test_division_is_even():
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    assert [sum(lengths[i] for i in some) for some in packing.divide(lengths, 100, 2)] == [18, 18]
    assert packing.divide([5, 5], 100) == [[0, 1]]
    assert packing.divide([5], 100, 2) == [[0], []]


def test_reading_ahead_keeps_the_order_and_its_depth():
    started = []

    def read(job):
        started.append(job)
        return job * job

    found = packing.read_ahead(range(6), read, depth=2)
    assert next(found) == 0
    time.sleep(0.1)
    assert started == [0, 1, 2]  # two ahead, not more
    assert list(found) == [1, 4, 9, 16, 25]


def test_an_error_while_reading_ahead_reaches_the_caller():
    def read(job):
        raise OSError("the shard is gone")

    with pytest.raises(OSError, match="the shard is gone"):
        next(packing.read_ahead([1], read))
