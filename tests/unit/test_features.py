"""The feature store: what goes in comes out; damage and a full disk are named and cost nothing that was finished."""

import errno
import json

import pytest
import torch

from eagle3_lib import features
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.extract import plan
from eagle3_lib.features import Sample, Store, Writer, bytes_per_token
from eagle3_lib.replay import Features


def sample(name, tokens, split="train"):
    generator = torch.Generator().manual_seed(tokens)
    fused, last = torch.randn(tokens, 12, generator=generator), torch.randn(tokens, 4, generator=generator)
    ids = torch.randint(0, 100, (tokens,), generator=generator)
    return Sample(name, split, 2, ids.tolist(), Features(fused, last, ids + 1))


@pytest.fixture
def store(tmp_path):
    writer = Writer(tmp_path, {"a": 1})
    writer.add_shard([sample("x", 5), sample("y", 7, "held_out")], torch.float32)
    writer.add_shard([sample("z", 6)], torch.float32)
    return tmp_path


def test_round_trip(store):
    opened = Store(store)
    assert len(opened) == 3 and opened.split("held_out") == [1]
    for number, expected in enumerate([sample("x", 5), sample("y", 7), sample("z", 6)]):
        found = opened[number]
        assert found.token_ids == expected.token_ids
        assert torch.equal(found.features.fused, expected.features.fused)
        assert torch.equal(found.features.last_hidden, expected.features.last_hidden)
        assert torch.equal(found.features.argmax.long(), expected.features.argmax)


def test_a_killed_writer_goes_on_after_its_last_whole_shard(store):
    (store / ".shard-00002.safetensors.1").write_bytes(b"half")
    writer = Writer(store, {"a": 1})
    assert writer.done == 3
    writer.add_shard([sample("w", 3)], torch.float32)
    assert [Store(store)[i].id for i in range(4)] == ["x", "y", "z", "w"]


def test_shards_of_other_settings_are_not_mixed(store):
    writer = Writer(store, {"a": 2})
    assert writer.done == 0 and not list(store.glob("shard-*"))


def test_a_truncated_shard_is_named(store):
    path = store / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Eagle3Error, match="shard-00001.safetensors: a truncated or damaged shard"):
        Store(store)


def test_a_missing_shard_and_a_wrong_size_are_named(store):
    index = json.loads((store / "index.json").read_text())
    index["shards"][1]["samples"][0]["tokens"] = 9
    (store / "index.json").write_text(json.dumps(index))
    with pytest.raises(Eagle3Error, match="found 6 tokens, expected 9"):
        Store(store)
    (store / "shard-00000.safetensors").unlink()
    with pytest.raises(Eagle3Error, match="shard-00000.safetensors: the index names this shard but it is missing"):
        Store(store)


def test_a_full_disk_keeps_finished_shards(store, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(features, "save_file", full)
    writer = Writer(store, {"a": 1})
    with pytest.raises(Eagle3Error, match=r"shard-00002.safetensors: the disk is full.*2 shards before it are kept"):
        writer.add_shard([sample("w", 3)], torch.float32)
    assert len(Store(store)) == 3
    assert not list(store.glob(".shard*"))


def test_bytes_of_kimi_k25_and_of_the_quickstart():
    # three boundaries and the last hidden state of 7168 bfloat16 values: 57,344 bytes; here 8 more for two token ids
    assert bytes_per_token(3, 7168, "bfloat16") == 57_344 + 8
    assert bytes_per_token(3, 576, "float32") == 4 * 576 * 4 + 8


def test_the_plan_tells_what_fits(tmp_path):
    small = plan(1000, 3, 576, "bfloat16", tmp_path / "not" / "yet")
    assert small["fits"] and small["bytes"] == 1000 * 4616
    assert not plan(10**15, 3, 576, "bfloat16", tmp_path)["fits"]
