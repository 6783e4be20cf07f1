"""The replay of a long text holds little more than its hidden states, keys and values; and no text or group may be too short."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle3_lib.drafter.model import Drafter, DrafterConfig, LatentSizes
from eagle3_lib.targets import capture
from eagle3_lib.verdict import replay

MIB = 2**20
CONFIG = DrafterConfig(
    hidden_size=64,
    intermediate_size=1024,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=4096,
    draft_vocab_size=4096,
    target_hidden_size=32,
    boundaries=(1, 2),
    own_embedding=True,
)
LATENT = LatentSizes(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)
SHAPES = {
    "grouped": CONFIG,
    "two layers": CONFIG.with_(num_hidden_layers=2),
    "latent": CONFIG.with_(latent=LATENT, num_key_value_heads=16),
}


class LiveBytes(TorchDispatchMode):
    """Counts the storage of every tensor made under it, until it is freed; ``peak`` in bytes."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = set(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return made

    def see(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.live:
            self.live.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.live.discard(key)
        self.now -= size


def right_everywhere(config: DrafterConfig, tokens: int) -> tuple[replay.Setup, replay.Texts]:
    """A drafter of a head of zeros on a text of its first token: all steps run at all slots."""
    drafter = Drafter(config).eval()
    drafter.initialise()
    torch.nn.init.normal_(drafter.embed_tokens.weight)
    torch.nn.init.zeros_(drafter.lm_head.weight)
    streams = {(capture.RESIDUAL, k): torch.randn(tokens, config.target_hidden_size) for k in config.boundaries}
    return replay.correct(drafter), replay.Texts([[0] * tokens], [1], [streams])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_peak_of_a_long_text(shape, monkeypatch):
    """All scores of one step would be 144 MiB, all logits of one step 24 MiB."""
    monkeypatch.setattr(replay, "ROWS", 128)
    monkeypatch.setattr(replay, "SCORES", 2**20)  # 4 MiB
    tokens = 1537
    setup, texts = right_everywhere(SHAPES[shape], tokens)
    with LiveBytes() as memory:
        (counts,) = replay.counts_at(setup, texts, replay.all_slots(texts), 2)
    assert counts == [2] * (tokens - 3) + [1, 0]
    heads = 16 * (16 + 12) if shape == "latent" else 2 * (8 + 8)
    held = 4 * (tokens - 1) * (2 * CONFIG.hidden_size + SHAPES[shape].num_hidden_layers * heads)
    assert memory.peak < held + 12 * MIB


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("changes", [{}, {"stale": True}, {"lag": 1, "prompt_cached": False}], ids=str)
def test_counts_do_not_depend_on_the_chunk(shape, changes, monkeypatch):
    """Texts of the drafter's own, so that rounds of every length occur; compared with the whole in one chunk."""
    config = SHAPES[shape].with_(draft_vocab_size=30, vocab_size=30)
    drafter, generator = Drafter(config).eval(), torch.Generator().manual_seed(3)
    drafter.initialise()
    torch.nn.init.normal_(drafter.embed_tokens.weight, generator=generator)
    for name, weight in drafter.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            weight.data *= 12  # far from ties
    texts, streams = [], []
    for tokens in (33, 21):
        of_text = {(capture.RESIDUAL, k): torch.randn(tokens, 32, generator=generator) for k in (1, 2)}
        fused, text = (
            torch.cat(list(of_text.values()), -1),
            torch.randint(0, 30, (tokens,), generator=generator).tolist(),
        )
        for slot in range(0, tokens - 5, 4):
            for step in range(slot // 4 % 4):
                proposed = replay.drafts(drafter, fused[None], torch.tensor([text]), 4)
                text[slot + 2 + step] = int(proposed[0, slot, step])
        texts.append(text)
        streams.append(of_text)
    laid = replay.Texts(texts, [5, 1], streams)
    setup = replay.Setup(drafter, replay.correct(drafter).sources, **changes)
    slots = replay.all_slots(laid)
    whole = replay.counts_at(setup, laid, slots, 4)
    monkeypatch.setattr(replay, "ROWS", 7)
    monkeypatch.setattr(replay, "SCORES", 300)
    assert replay.counts_at(setup, laid, slots, 4) == whole
    if not changes:
        assert {count for some in whole for count in some} >= {0, 1, 2, 3}


@pytest.mark.parametrize("stale", [False, True])
def test_groups_without_a_slot(stale):
    setup, texts = right_everywhere(CONFIG, 6)
    setup = replay.Setup(setup.drafter, setup.sources, stale=stale)
    assert replay.counts_at(setup, texts, [[]], 4) == [[]]
    assert replay.counts_at(setup, texts, [[]], 4, [[]]) == [[]]


@pytest.mark.parametrize("stale", [False, True])
def test_answers_of_one_token_of_none_and_texts_of_one(stale):
    setup, long = right_everywhere(CONFIG, 8)
    setup = replay.Setup(setup.drafter, setup.sources, stale=stale)
    lengths, prompts = [1, 4, 4, 8], [1, 3, 4, 2]  # a text of one token, an answer of one, of none, of six
    texts = [[0] * length for length in lengths]
    streams = [{name: torch.randn(length, 32) for name in long.streams} for length in lengths]
    laid = replay.Texts(texts, prompts, streams)
    assert replay.all_slots(laid) == [[], [2], [], [1, 2, 3, 4, 5, 6]]
    counts = replay.counts_at(setup, laid, replay.all_slots(laid), 2)
    assert counts[:3] == [[], [0], []]
    assert replay.own_rounds(counts, laid) == [[], [], [], [2, 2]]
    assert stale or counts[3] == [2, 2, 2, 2, 1, 0]
    alone = replay.Texts([[0]], [1], [streams[0]])
    assert replay.counts_at(setup, alone, replay.all_slots(alone), 2) == [[]]
