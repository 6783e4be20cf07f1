"""The feature store: what goes in comes out; damage and a full disk are named and cost nothing that was finished."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open

from eagle3_lib.compat.disk_plan import bytes_per_token, plan
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.features.store import FLOAT8, Sample, Store, Writer, damaged, from_float8, to_float8
from eagle3_lib.paths import ROOT
from eagle3_lib.targets.capture import Features


def sample(name, tokens, split="train", width=4):
    generator = torch.Generator().manual_seed(tokens)
    fused, last = (torch.randn(tokens, n * width, generator=generator) for n in (3, 1))
    ids = torch.randint(0, 100, (tokens,), generator=generator)
    return Sample(name, split, 2, ids.tolist(), Features(fused, last, ids + 1, draft_mass=ids / 100))


@pytest.fixture
def store(tmp_path):
    writer = Writer(tmp_path, {"a": 1})
    writer.add_shard(0, [sample("x", 5), sample("y", 7, "held_out")], torch.float32)
    writer.add_shard(1, [sample("z", 6)], torch.float32)
    return tmp_path


def flip(path, place=-3):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def test_round_trip(store):
    opened = Store(store, verify=True)
    assert len(opened) == 3 and opened.split("held_out") == [1]
    for number, expected in enumerate([sample("x", 5), sample("y", 7), sample("z", 6)]):
        found = opened[number]
        assert found.token_ids == expected.token_ids
        assert torch.equal(found.features.fused, expected.features.fused)
        assert torch.equal(found.features.last_hidden, expected.features.last_hidden)
        assert torch.equal(found.features.argmax.long(), expected.features.argmax)
        assert torch.equal(found.features.draft_mass, expected.features.draft_mass)


def test_a_window_is_part_of_a_sample(store):
    whole, window = Store(store)[1], Store(store).window(1, 1, 4)
    assert window.token_ids == whole.token_ids[1:4] and window.prompt_length == 1
    assert torch.equal(window.features.fused, whole.features.fused[1:4])


def test_a_shard_is_a_safetensors_file(store):
    with safe_open(store / "shard-00000.safetensors", "pt") as file:
        assert set(file.keys()) == {"argmax", "draft_mass", "fused", "last_hidden", "token_ids"}
        assert torch.equal(file.get_tensor("fused")[:5], sample("x", 5).features.fused)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_bytes_per_token_are_the_plans(tmp_path, dtype):
    writer = Writer(tmp_path, {})
    writer.add_shard(0, [sample("x", 500, width=128)], getattr(torch, dtype))
    size = sum(shard["bytes"] for shard in writer.shards.values())
    assert size / 500 == pytest.approx(bytes_per_token(3, 128, dtype), rel=0.01)


def test_float8_keeps_small_values_beside_outliers():
    values = torch.randn(50, 256, generator=torch.Generator().manual_seed(0))
    values[:, 7] *= 25_000  # as residual streams have them
    stored, scale = to_float8(values, 64)
    assert stored.dtype == FLOAT8 and scale.shape == (50, 4)
    back = from_float8(stored, scale)
    without = values[:, 64:]
    assert (back[:, 64:] - without).norm() / without.norm() < 0.03
    assert ((back[:, 7] - values[:, 7]).abs() / values[:, 7].abs()).max() < 0.07
    assert torch.equal(from_float8(*to_float8(torch.zeros(2, 64), 64)), torch.zeros(2, 64))


def test_float8_is_read_as_float32(tmp_path):
    Writer(tmp_path, {}).add_shard(0, [sample("x", 9, width=64)], FLOAT8)
    found, expected = Store(tmp_path)[0].features, sample("x", 9, width=64).features
    assert found.fused.dtype == torch.float32
    assert (found.fused - expected.fused).norm() / expected.fused.norm() < 0.03


def test_a_killed_writer_goes_on_after_its_last_whole_shard(store):
    (store / ".shard-00002.safetensors.1").write_bytes(b"half")
    writer = Writer(store, {"a": 1}, verify=True)
    assert writer.has(0, ["x", "y"]) and writer.has(1, ["z"]) and not writer.has(2, ["w"])
    assert not writer.has(1, ["other"])
    writer.add_shard(2, [sample("w", 3)], torch.float32)
    assert [Store(store)[i].id for i in range(4)] == ["x", "y", "z", "w"]


WRITE_FOR_EVER = """
import sys, torch
from pathlib import Path
from eagle3_lib.features.store import Sample, Writer
from eagle3_lib.targets.capture import Features
writer = Writer(Path(sys.argv[1]), {"a": 1})
ids = torch.arange(2000)
one = Sample("s", "train", 2, ids.tolist(), Features(torch.randn(2000, 3072), torch.randn(2000, 1024), ids))
for number in range(10_000):
    writer.add_shard(number, [one], torch.float32)
"""


@pytest.mark.slow
def test_sigkill_inside_a_shard_loses_no_finished_one(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "shard-00003.safetensors").is_file() or not list(tmp_path.glob(".shard-*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    finished = json.loads((tmp_path / "index.json").read_text())["shards"]
    assert len(finished) >= 3 and damaged(tmp_path, finished) == []
    assert len(Store(tmp_path, verify=True)) == len(finished)
    assert Writer(tmp_path, {"a": 1}, verify=True).has(len(finished) - 1, ["s"])


def test_shards_of_other_settings_are_not_mixed(store):
    writer = Writer(store, {"a": 2})
    assert not writer.shards and not list(store.glob("shard-*"))


def test_a_truncated_shard_is_named(store):
    path = store / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Eagle3Error, match="shard-00001.safetensors: a truncated or damaged shard"):
        Store(store)


def test_a_flipped_byte_is_named_and_the_rest_is_usable(store, capsys):
    flip(store / "shard-00000.safetensors")
    assert len(Store(store)) == 3  # sizes are right; only the sha256 tells
    with pytest.raises(Eagle3Error, match="shard-00000.safetensors: a damaged shard .its sha256 is not the index's"):
        Store(store, verify=True)
    rest = Store(store, verify=True, skip_damaged=True)
    assert [rest[i].id for i in range(len(rest))] == ["z"]
    assert "shard-00000.safetensors: a damaged shard" in capsys.readouterr().out
    writer = Writer(store, {"a": 1}, verify=True)
    assert "shard-00000.safetensors: damaged, written anew" in capsys.readouterr().out
    assert not writer.has(0, ["x", "y"]) and writer.has(1, ["z"])
    writer.add_shard(0, [sample("x", 5), sample("y", 7, "held_out")], torch.float32)
    assert [Store(store, verify=True)[i].id for i in range(3)] == ["x", "y", "z"]


def test_a_flipped_byte_in_a_header_is_named(store):
    flip(store / "shard-00000.safetensors", place=12)
    with pytest.raises(Eagle3Error, match="shard-00000.safetensors: a (truncated or )?damaged shard"):
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


def test_an_index_of_another_schema_is_refused(store):
    index = json.loads((store / "index.json").read_text())
    (store / "index.json").write_text(json.dumps(index | {"schema": 1}))
    with pytest.raises(Eagle3Error, match="schema: found 1, expected 2; run stage extract again"):
        Store(store)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_finished_shards(small_disk):
    writer = Writer(small_disk, {"a": 1})
    with pytest.raises(
        Eagle3Error, match=r"shard-00002.safetensors: the disk is full.*The 2 shards before it are kept"
    ):
        for number in range(3):
            writer.add_shard(number, [sample(f"s{number}", 400, width=64)], torch.float32)
    assert len(Store(small_disk, verify=True)) == 2 and not list(small_disk.glob(".shard*"))
    assert Writer(small_disk, {"a": 1}, verify=True).has(1, ["s1"])


def test_parts_of_several_hosts_are_joined_by_the_index(tmp_path):
    rows = [sample(name, 4 + i) for i, name in enumerate("abcde")]
    for part in range(2):
        writer = Writer(tmp_path, {"a": 1}, part, parts=2)
        for number in range(part, 5, 2):
            writer.add_shard(number, [rows[number]], torch.bfloat16)
    before = {path: path.stat().st_ino for path in tmp_path.glob("shard-*")}
    whole = Writer(tmp_path, {"a": 1}, verify=True)
    assert all(whole.has(number, [row.id]) for number, row in enumerate(rows))
    whole.write_index()
    opened = Store(tmp_path, verify=True)
    assert [opened[i].id for i in range(5)] == list("abcde")
    assert before == {path: path.stat().st_ino for path in tmp_path.glob("shard-*")}  # the same files, no copy


def test_bytes_of_kimi_k25_and_of_the_quickstart():
    # three boundaries and the last hidden state of 7168 bfloat16 values: 57,344 bytes; here 12 more (id, choice, mass)
    assert bytes_per_token(3, 7168, "bfloat16") == 57_344 + 12
    assert bytes_per_token(3, 576, "float32") == 4 * 576 * 4 + 12


def disk_of(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(2 * free, free, free))


def test_kimi_k25s_ten_thousand_samples(monkeypatch, tmp_path):
    """17.3 million tokens at [2, 30, 58, 60]: 1.24 TB in bfloat16, 0.66 TB in float8."""
    kimi = (17_300_000, len([2, 30, 58, 60]), 7168, "bfloat16", tmp_path)
    disk_of(monkeypatch, 2 * 10**12)
    fits = plan(*kimi)
    assert fits["bytes_per_token"] == 5 * 7168 * 2 + 12 == 71_692
    assert fits["bytes"] == 17_300_000 * 71_692 and fits["bytes"] / 1e12 == pytest.approx(1.24, abs=0.01)
    assert fits["fits"] and fits["advice"].startswith("fits: 1240.27 GB")
    disk_of(monkeypatch, 10**12)
    smaller = plan(*kimi)
    assert not smaller["fits"] and smaller["fitting_dtypes"] == ["float8_e4m3fn"]
    assert "float8_e4m3fn takes 658.99 GB and fits" in smaller["advice"]
    disk_of(monkeypatch, 5 * 10**11)
    assert plan(*kimi)["fitting_dtypes"] == [] and "storage: online" in plan(*kimi)["advice"]


def test_the_plan_tells_what_fits(tmp_path):
    small = plan(1000, 3, 576, "bfloat16", tmp_path / "not" / "yet")
    assert small["fits"] and small["bytes"] == 1000 * 4620
    assert not plan(10**15, 3, 576, "bfloat16", tmp_path)["fits"]
