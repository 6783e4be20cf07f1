"""A head of another kind is one module: training's unroll and the replay run it by the seam's methods, and agree."""

import inspect

import pytest
import torch
from test_drafter_attention import BASE
from torch import nn

from eagle3_lib.drafter import seam
from eagle3_lib.drafter.attention import lattice_attention
from eagle3_lib.drafter.model import DecoderLayer, Drafter
from eagle3_lib.targets import capture
from eagle3_lib.verdict import changes, replay

STEPS = 4
CONFIG = BASE.with_(vocab_size=4, draft_vocab_size=4, target_hidden_size=16, own_embedding=True)


class GatedMix(nn.Module):
    """A layer without attention: the hidden state and the embedding, mixed by a gate of both."""

    scale = 1.0

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.mix = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def enter(self, embeds, hidden):
        both = torch.cat([embeds, hidden], -1)
        return both, both

    def query(self, inputs, rope):
        return inputs[:, None, :, :0]

    def states(self, inputs, rope):
        return inputs[:, None, :, :0], inputs[:, None, :, :0]

    def attend(self, query, cache, documents):
        return query

    def leave(self, residual, mixed):
        gate, hidden = self.gate(residual).sigmoid(), residual.chunk(2, -1)[1]
        return hidden * gate + self.mix(residual).tanh() * (1 - gate)

    def forward(self, embeds, hidden, rope, cache, documents=None):
        return seam.forward(self, embeds, hidden, rope, cache, documents)


class GatedAttention(nn.Module):
    """Attention without rope, of two query heads and one key head, with a scale of its own and a gate on its output."""

    scale = 0.2

    def __init__(self, config):
        super().__init__()
        inputs = 2 * config.hidden_size
        self.queries, self.keys, self.values = nn.Linear(inputs, 2 * 6), nn.Linear(inputs, 6), nn.Linear(inputs, 10)
        self.gate, self.out = nn.Linear(inputs, 2 * 10), nn.Linear(2 * 10, config.hidden_size)

    def enter(self, embeds, hidden):
        inputs = torch.cat([embeds, hidden], -1)
        return inputs, torch.cat([hidden, self.gate(inputs).sigmoid()], -1)

    def query(self, inputs, rope):
        return self.queries(inputs).unflatten(-1, (2, 6)).transpose(1, 2)

    def states(self, inputs, rope):
        return self.keys(inputs)[:, None], self.values(inputs)[:, None]

    def attend(self, query, cache, documents):
        return lattice_attention(query, cache, self.scale, documents)

    def leave(self, residual, mixed):
        hidden, gate = residual.split([residual.shape[-1] - 20, 20], -1)
        return hidden + self.out(mixed.transpose(1, 2).flatten(2) * gate)

    def forward(self, embeds, hidden, rope, cache, documents=None):
        return seam.forward(self, embeds, hidden, rope, cache, documents)


class OfGatedMix(Drafter):
    def new_layer(self, first):
        return GatedMix(self.config)


class OfGatedAttention(Drafter):
    def new_layer(self, first):
        return GatedAttention(self.config)


class AttentionThenMix(Drafter):
    def new_layer(self, first):
        return DecoderLayer(self.config, first) if first else GatedMix(self.config)


class Medusa(Drafter):
    """No layers and no embedding: each step has a block of its own over the fused features (arXiv 2401.10774)."""

    def __init__(self, config):
        super().__init__(config.with_(num_hidden_layers=0))
        self.blocks = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(STEPS))

    def finish(self, hidden, step):
        return self.norm(hidden + nn.functional.silu(self.blocks[step](hidden))), hidden


HEADS = {
    "eagle3": (Drafter, CONFIG),
    "gated mix": (OfGatedMix, CONFIG),
    "gated attention": (OfGatedAttention, CONFIG),
    "two layers of gated attention": (OfGatedAttention, CONFIG.with_(num_hidden_layers=2)),
    "attention, then a mix": (AttentionThenMix, CONFIG.with_(num_hidden_layers=2)),
    "medusa": (Medusa, CONFIG),
}


def made(name: str) -> tuple[Drafter, torch.Generator]:
    kind, config = HEADS[name]
    drafter, generator = kind(config), torch.Generator().manual_seed(7)
    for parameter in drafter.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)
    return drafter.eval(), generator


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_replay_and_unroll_agree_at_every_slot(name, norm_output, monkeypatch):
    monkeypatch.setattr(replay, "ROWS", 32)  # several chunks
    drafter, generator = made(name)
    drafter = changes.variant(drafter, norm_output=norm_output)
    texts, streams, expected = [], [], []
    for tokens in (61, 30):
        text = torch.randint(4, (tokens,), generator=generator)
        of_text = {(capture.RESIDUAL, k): torch.randn(tokens, 16, generator=generator) for k in CONFIG.boundaries}
        proposed = replay.drafts(drafter, torch.cat(list(of_text.values()), -1)[None], text[None], STEPS)[0]
        texts.append(text.tolist())
        streams.append(of_text)
        expected.append(replay.accepted_at(proposed, texts[-1]))
    laid = replay.Texts(texts, [1, 1], streams)
    found = replay.counts_at(replay.correct(drafter), laid, replay.all_slots(laid), STEPS)
    assert found == expected
    assert {0, 1, 2} <= {count for counts in found for count in counts}
    assert [len(counts) for counts in found] == [60, 29]


@pytest.mark.parametrize("name", HEADS)
def test_training_reaches_every_weight(name):
    drafter, generator = made(name)
    ids = torch.randint(4, (1, 12), generator=generator)
    features = torch.randn(1, 12, drafter.config.feature_size, generator=generator)
    torch.stack(list(drafter.unroll(features, ids, STEPS))).square().sum().backward()
    for weight_name, weight in drafter.named_parameters():
        assert not weight.requires_grad or weight.grad.isfinite().all(), weight_name


@pytest.mark.parametrize(("protocol", "kind"), [(seam.Layer, DecoderLayer), (seam.Head, Drafter)])
def test_methods_are_those_of_the_seam(protocol, kind):
    """torch's Module counts as Any for mypy, so signatures are compared here."""
    for name, method in vars(protocol).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            assert inspect.signature(getattr(kind, name)) == inspect.signature(method), name
    if protocol is seam.Layer:
        assert inspect.signature(kind.forward) == inspect.signature(protocol.__call__)
