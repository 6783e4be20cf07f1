"""Backends held against one another, the draft vocabulary, and stage 04 as a whole on a tiny target."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_lib.drafter import checkpoint, vocabulary
from eagle3_lib.drafter.model import Drafter, DrafterConfig
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.features import parity
from eagle3_lib.features.store import Store
from eagle3_lib.features.wanted import Tail, Wanted
from eagle3_lib.params import ExtractParams
from eagle3_lib.stages import extract
from eagle3_lib.targets import capture
from eagle3_lib.targets.answers import Answer, read_answers, write_parquet

VOCAB, HIDDEN, LAYERS = 200, 64, 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A target of six random layers, a drafter for it with a vocabulary of 50, and 40 answers."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=2))
    model.save_pretrained(folder / "target")
    config = DrafterConfig(HIDDEN, 96, 4, 2, 16, VOCAB, 50, HIDDEN, (1, 3, 5))
    drafter = Drafter(config)
    drafter.initialise()
    drafter.set_vocabulary(torch.arange(50) * 3)
    drafter.share_embedding(model.get_input_embeddings().weight)
    checkpoint.save(drafter, folder / "drafter")
    generator = torch.Generator().manual_seed(1)
    rows = []
    for n in range(40):
        ids = torch.randint(3, VOCAB, (12 + n % 9,), generator=generator).tolist()
        split = "held_out" if n % 4 == 0 else "train"
        rows.append(Answer(f"s{n}", split, "p", ids[:5], ids[5:], "t", "stop", 0.1))
    (folder / "data").mkdir()
    write_parquet(rows, folder / "data" / "samples.parquet")
    return folder, model.eval(), rows


def params_for(tiny, out, **more):
    folder = tiny[0]
    names = {"data": folder / "data", "target": folder / "target", "drafter": folder / "drafter", "out": out}
    return ExtractParams(**{name: str(path) for name, path in names.items()}, **({"shard_tokens": 100} | more))


def test_the_store_holds_what_the_target_computes(tiny, tmp_path):
    notes = extract.run(params_for(tiny, tmp_path / "out", feature_dtype="float32"))
    store, (_, model, rows) = Store(tmp_path / "out", verify=True), tiny
    assert len(store) == 40 and notes["shards"] == len(store.files) > 3
    assert notes["bytes"] == pytest.approx(notes["planned_bytes"], rel=0.1)  # headers weigh in shards this small
    ids = torch.arange(50) * 3
    for number in (0, 17, 39):
        text = rows[number].prompt_ids + rows[number].output_ids
        with torch.no_grad():
            whole = model(torch.tensor([text]), output_hidden_states=True)
        found = store[number].features
        fused = torch.cat([whole.hidden_states[k][0] for k in (1, 3, 5)], -1)
        assert torch.allclose(found.fused, fused, atol=1e-4)
        assert torch.equal(found.argmax.long(), whole.logits[0].argmax(-1))
        assert torch.allclose(found.draft_mass, whole.logits[0].softmax(-1)[:, ids].sum(-1), atol=1e-5)


def test_a_store_that_goes_on_writes_only_what_is_missing(tiny, tmp_path, capsys):
    params = params_for(tiny, tmp_path / "out")
    extract.run(params)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    names = [shard["file"] for shard in index["shards"]]
    raw = bytearray((tmp_path / "out" / names[1]).read_bytes())
    raw[-5] ^= 1
    (tmp_path / "out" / names[1]).write_bytes(raw)
    kept = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names}
    extract.run(params)
    assert f"{names[1]}: damaged, written anew" in capsys.readouterr().out
    again = json.loads((tmp_path / "out" / "index.json").read_text())
    assert [s["sha256"] for s in again["shards"]] == [s["sha256"] for s in index["shards"]]  # the same features
    changed = [name for name in names if (tmp_path / "out" / name).stat().st_mtime_ns != kept[name]]
    assert changed == [names[1]]


def test_parts_and_then_the_whole_give_the_same_store(tiny, tmp_path):
    extract.run(params_for(tiny, tmp_path / "alone"))
    for part in range(3):
        extract.run(params_for(tiny, tmp_path / "together", part=part, parts=3))
    notes = extract.run(params_for(tiny, tmp_path / "together", parts=3))
    assert notes["tokens_per_s"] is None  # nothing was left to compute
    indexes = [json.loads((tmp_path / name / "index.json").read_text()) for name in ("alone", "together")]
    assert indexes[0] == indexes[1]


def test_online_features_are_those_of_the_disk(tiny, tmp_path):
    extract.run(params_for(tiny, tmp_path / "disk", feature_dtype="float32"))
    notes = extract.run(params_for(tiny, tmp_path / "online", storage="online"))
    disk, online = Store(tmp_path / "disk"), Store(tmp_path / "online")
    assert notes["bytes"] == 0 and len(online) == 40 and online.split("held_out") == disk.split("held_out")
    assert not list((tmp_path / "online").glob("shard-*"))
    for number in (0, 21):
        here, there = disk[number], online[number]
        assert here.token_ids == there.token_ids
        assert torch.allclose(here.features.fused, there.features.fused, atol=1e-4)
        assert torch.allclose(here.features.draft_mass, there.features.draft_mass, atol=1e-5)
    assert torch.allclose(online.window(3, 2, 6).features.fused, disk.window(3, 2, 6).features.fused, atol=1e-4)


def test_a_store_that_does_not_fit_is_refused(tiny, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(2000, 1000, 1000))
    with pytest.raises(Eagle3Error, match="does not fit: .* GB are free; storage: online"):
        extract.run(params_for(tiny, tmp_path / "out"))


def test_boundaries_beyond_the_target_are_refused(tiny, tmp_path):
    with pytest.raises(Eagle3Error, match="boundaries: found 7, expected 0 to 6"):
        extract.run(params_for(tiny, tmp_path / "out", boundaries=[1, 7]))


def test_the_tail_of_the_target_from_its_files(tiny):
    folder, model, rows = tiny
    text, ids = rows[0].prompt_ids + rows[0].output_ids, torch.arange(50) * 3
    (whole,) = capture.capture(model, [text], [1, LAYERS], draft_ids=ids)
    tail = Tail(Wanted(folder / "target", (1, LAYERS), ids))
    found = tail.features(whole.streams, LAYERS)
    assert torch.allclose(found.last_hidden, whole.last_hidden, atol=1e-5)
    assert torch.equal(found.argmax, whole.argmax) and torch.allclose(found.draft_mass, whole.draft_mass, atol=1e-5)


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def streams(tiny):
    _, model, rows = tiny
    texts = [row.prompt_ids + row.output_ids for row in rows[:4]]
    every = torch.cat([f.fused for f in capture.capture(model, texts, range(LAYERS + 1))])
    return dict(enumerate(every.unflatten(-1, (LAYERS + 1, -1)).unbind(-2)))


def some(streams, boundaries, shift=0):
    return {k: streams[k + shift] + 1e-6 for k in boundaries}


def test_backends_that_agree(streams):
    rows = parity.compare(some(streams, (1, 3, 5)), streams, "float32")
    result = parity.demand(rows, "vllm", "transformers")
    assert [row["boundary"] for row in result["boundaries"]] == [1, 3, 5]
    assert all(row["relative_error"] < 1e-4 and row["cosine"] > 0.999 and row["agrees"] for row in result["boundaries"])


@pytest.mark.parametrize(("shift", "nearest"), [(1, 4), (-1, 2)])
def test_off_by_one_is_named(streams, shift, nearest):
    rows = parity.compare(some(streams, (1, 3, 5), shift), streams, "float32")
    with pytest.raises(Eagle3Error) as error:
        parity.demand(rows, "vllm", "transformers")
    said = str(error.value)
    assert f"boundary 3: relative error {rows[1].relative_error:.2g}" in said
    assert f"vllm holds there what transformers has at boundary {nearest}: off by one" in said
    assert f"All are off by {shift:+d}." in said


def test_off_by_one_in_the_reference_is_named(streams):
    shifted = {k: streams[max(k - 1, 0)] for k in streams}
    rows = parity.compare({k: streams[k] for k in (1, 3, 5)}, shifted, "float32")
    with pytest.raises(Eagle3Error, match="vllm holds there what transformers has at boundary 4: off by one"):
        parity.demand(rows, "vllm", "transformers")


def test_noise_at_one_boundary_is_named_and_is_no_shift(streams):
    found = some(streams, (1, 3, 5))
    found[3] = torch.randn(found[3].shape, generator=torch.Generator().manual_seed(2)) * found[3].std()
    with pytest.raises(Eagle3Error) as error:
        parity.demand(parity.compare(found, streams, "float32"), "vllm", "transformers")
    assert "boundary 3:" in str(error.value) and "boundary 1:" not in str(error.value)


def test_the_last_boundary_after_the_norm_is_named(streams, tiny):
    """What transformers' output_hidden_states has at the end is not the residual stream."""
    found = {LAYERS: tiny[1].model.norm(streams[LAYERS] * 3)}
    with pytest.raises(Eagle3Error, match=f"boundary {LAYERS}:"):
        parity.demand(parity.compare(found, streams, "float32"), "transformers", "vllm")


def test_a_long_extraction_does_not_start_where_backends_differ(tiny, tmp_path, monkeypatch):
    notes = extract.run(params_for(tiny, tmp_path / "same", parity_with="transformers"))
    assert [row["relative_error"] for row in notes["parity"]["boundaries"]] == [0.0, 0.0, 0.0]
    assert json.loads((tmp_path / "same" / "parity.json").read_text()) == notes["parity"]

    def late(wanted):  # hands over the stream one layer further than asked for
        return extract.BACKENDS["transformers"](replace(wanted, boundaries=tuple(k + 1 for k in wanted.boundaries)))

    monkeypatch.setitem(extract.BACKENDS, "vllm", late)
    with pytest.raises(Eagle3Error, match=r"boundary 3: .*has at boundary 4: off by one"):
        extract.run(params_for(tiny, tmp_path / "other", backend="vllm", parity_with="transformers"))
    assert not list((tmp_path / "other").glob("shard-*"))


# --- vocabulary -------------------------------------------------------------------------------------------------------


def test_counts_are_of_the_training_answers_alone(tiny):
    rows = tiny[2]
    counts = vocabulary.count(rows, VOCAB)
    taught = [token for row in rows if row.split == "train" for token in row.output_ids]
    assert counts.sum() == len(taught) and counts[taught[0]] == taught.count(taught[0])


def test_maps_and_coverage():
    counts = torch.tensor([5, 0, 9, 1, 5])
    ids = vocabulary.most_frequent(counts, 3)
    assert ids.tolist() == [0, 2, 4]
    maps = vocabulary.maps(ids, 5)
    assert maps["d2t"].tolist() == [0, 1, 2] and maps["t2d"].tolist() == [True, False, True, False, True]
    assert vocabulary.coverage(counts, ids) == pytest.approx(0.95)
    assert vocabulary.coverage_by_size(counts, [2]) == [
        {"size": 2, "coverage": pytest.approx(0.7)},
        {"size": 5, "coverage": 1.0},
    ]
    assert vocabulary.most_frequent(counts, 2, always=[1]).tolist() == [1, 2]  # an end token is always there


def test_the_drafters_map_is_kept_and_another_refused_unless_asked_for(tiny, tmp_path):
    notes = extract.run(params_for(tiny, tmp_path / "own"))
    kept = load_file(tmp_path / "own" / "vocabulary.safetensors")
    assert torch.equal(kept["d2t"], torch.arange(50) * 2) and 0 < notes["coverage"] < 1
    with pytest.raises(
        Eagle3Error, match=r"draft_vocab_size: found 60, whose map keeps \d+ of the drafter's 50 tokens"
    ):
        extract.run(params_for(tiny, tmp_path / "new", draft_vocab_size=60))
    more = extract.run(params_for(tiny, tmp_path / "new", draft_vocab_size=60, change_vocabulary=True))
    made = load_file(tmp_path / "new" / "vocabulary.safetensors")
    assert made["t2d"].sum() == 60 and made["t2d"][2]  # the end token, though no answer has it
    assert more["coverage"] > notes["coverage"]
    by_size = json.loads((tmp_path / "new" / "coverage.json").read_text())["by_size"]
    assert by_size[-1] == {"size": VOCAB, "coverage": 1.0}


def test_answers_survive_parquet(tmp_path):
    row = Answer("a", "train", "p", [1], [2, 3], "t", "stop", 0.5, reasoning="r", reasoning_span=[0, 1])
    write_parquet([row], tmp_path / "samples.parquet")
    assert [asdict(a) for a in read_answers(tmp_path)] == [asdict(row)]
