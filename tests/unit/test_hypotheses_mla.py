"""Every hypothesis on drafters with latent attention, beside an engine that has the fault and is built without the catalogue.

The engine here decodes one draft after the other with a plain cache. What it is given, and its drafter, are made anew for
each fault: a Drafter of another config, edited weights, other streams of the target's own hidden states.
"""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from eagle3_lib.drafter import checkpoint
from eagle3_lib.drafter.model import Drafter
from eagle3_lib.paths import ROOT
from eagle3_lib.targets import capture, targets
from eagle3_lib.verdict import changes, faults, hypotheses

STEPS, LAYERS = 4, 12
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
NOT_ON_THESE = {"captured before the sum over ranks"}  # tests/unit/test_faults.py; all boundaries here follow experts


@dataclass
class Engine:
    """One that drafts. fused: of a text's hidden states; the others as in replay.Setup."""

    drafter: Drafter
    fused: object
    through_fc: bool = True
    first_token: int = 1
    advance: int = 1
    prompt_cached: bool = True
    stale: bool = False
    right_steps: int = STEPS

    @torch.no_grad()
    def rounds(self, text, start: int, states) -> list[int]:
        """Accepted counts until the text is emitted."""
        drafter, ids = self.drafter, torch.tensor(text)
        features = self.fused(states)[:-1]
        hidden = drafter.fuse(features) if self.through_fc else features
        embeds = drafter.embed_tokens(ids[self.first_token : self.first_token + len(hidden)])
        query, keys, values, residual = self.enter(embeds, hidden, torch.arange(len(hidden)))
        if not self.prompt_cached:
            keys[:, : start - 1], values[:, : start - 1] = 0, 0
        rounds, slot = [], start - 1
        while slot < len(text) - 2:
            own, accepted = [], 0
            row = query[:, slot], residual[slot]
            for step in range(STEPS):
                every_key = torch.cat([keys[:, : slot + 1], *(key for key, _ in own)], 1)
                every_value = torch.cat([values[:, : slot + 1], *(value for _, value in own)], 1)
                stream = self.leave(*row, every_key, every_value)
                normed = drafter.norm(stream)
                proposed = int(drafter.target_ids[drafter.lm_head(normed).argmax()])
                right = slot + 2 + step < len(text) and proposed == text[slot + 2 + step] and step < self.right_steps
                if not right or step == STEPS - 1:
                    accepted += right
                    break
                accepted += 1
                fed = normed if drafter.config.norm_output else stream
                at = torch.tensor([slot + (step + 1) * self.advance])
                step_query, key, value, step_residual = self.enter(
                    drafter.embed_tokens(ids[[slot + 2 + step]]), fed[None], at
                )
                own.append((key, value))
                row = step_query[:, 0], step_residual[0]
            if self.stale:
                for step, (key, value) in enumerate(own[:accepted], 1):
                    keys[:, slot + step], values[:, slot + step] = key[:, 0], value[:, 0]
                if accepted == STEPS and slot + STEPS < keys.shape[1]:
                    keys[:, slot + STEPS], values[:, slot + STEPS] = 0, 0  # never written
            rounds.append(accepted)
            slot += accepted + 1
        return rounds

    def enter(self, embeds, hidden, positions):
        """Query, keys, values [heads, rows, d] and the residual [rows, H]."""
        (layer,) = self.drafter.layers
        normed = layer.hidden_norm(hidden)
        x = torch.cat([layer.input_layernorm(embeds), normed], -1)[None]
        rope = self.drafter.rotary(x, positions[None])
        keys, values = layer.self_attn.states(x, rope)
        residual = normed if self.drafter.config.norm_before_residual else hidden
        return layer.self_attn.query(x, rope)[0], keys[0].clone(), values[0].clone(), residual

    def leave(self, query, residual, keys, values):
        """One row through attention and MLP."""
        (layer,) = self.drafter.layers
        scores = torch.einsum("hd,htd->ht", query, keys) * layer.self_attn.scale
        mixed = torch.einsum("ht,htd->hd", scores.softmax(-1), values)
        stream = residual + layer.self_attn.o_proj(mixed.flatten())
        return stream + layer.mlp(layer.post_attention_layernorm(stream))


def fresh(drafter: Drafter, tensors: dict | None = None, **config) -> Drafter:
    """Made anew under a changed config, with the same weights but the given ones."""
    new = Drafter(drafter.config.with_(**config))
    new.initialise()
    kept = {name: tensor for name, tensor in drafter.state_dict().items() if name in new.state_dict()}
    new.load_state_dict(kept | (tensors or {}), strict=False)
    return new.eval()


def at(*boundaries):
    """The target's residual streams, side by side."""
    return lambda states: torch.cat([states.residual[k] for k in boundaries], -1)


def engines(drafter: Drafter, target) -> dict[str, Engine]:
    """By the fault's name."""
    low, middle, high = configured = drafter.config.boundaries
    right, head, norm = at(*configured), target.lm_head.weight, target.model.norm
    rows, ids = len(drafter.d2t), drafter.target_ids
    zeros = lambda states: torch.zeros_like(states.residual[low])  # noqa: E731
    random_head = torch.randn(drafter.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)) * 0.02
    shifted = lambda states: torch.cat([right(states)[:1], right(states)[:-1]])  # noqa: E731
    float8 = lambda s: torch.cat([rounded_to_float8(s.residual[k]) for k in configured], -1)  # noqa: E731

    def with_weights(**tensors):
        return Engine(fresh(drafter, {name.replace("__", "."): tensor for name, tensor in tensors.items()}), right)

    def with_config(**config):
        return Engine(fresh(drafter, **config), right)

    def given(fused, **changes):
        return Engine(drafter, fused, **changes)

    of_target = fresh(drafter, rope_parameters=target.config.rope_parameters)
    of_target.layers[0].self_attn.scale = drafter.layers[0].self_attn.scale  # of the drafter's own config
    embedding = drafter.embed_tokens.weight
    return {
        changes.HEALTHY: given(right),
        "boundaries -1": given(at(low - 1, middle - 1, high - 1)),
        "boundaries +1": given(at(low + 1, middle + 1, high + 1)),
        "default boundaries": given(at(2, 6, 9)),
        "last three boundaries": given(at(10, 11, 12)),
        "last hidden only": given(lambda states: norm(states.residual[LAYERS]), through_fc=False),
        "boundaries reversed": given(at(high, middle, low)),
        "first two boundaries swapped": given(at(middle, low, high)),
        "last two boundaries swapped": given(at(low, high, middle)),
        "low boundary dropped": given(lambda s: torch.cat([zeros(s), s.residual[middle], s.residual[high]], -1)),
        "middle boundary dropped": given(lambda s: torch.cat([s.residual[low], zeros(s), s.residual[high]], -1)),
        "high boundary dropped": given(lambda s: torch.cat([s.residual[low], s.residual[middle], zeros(s)], -1)),
        "features after the final norm": given(lambda s: torch.cat([norm(s.residual[k]) for k in configured], -1)),
        "last feature after the final norm": given(
            lambda s: torch.cat([s.residual[low], s.residual[middle], norm(s.residual[high])], -1)
        ),
        "residual missing": given(lambda s: torch.cat([s.update[k] for k in configured], -1)),
        "last update missing": given(lambda s: torch.cat([s.before[k] for k in configured], -1)),
        "features one slot late": given(shifted),
        "token shift": given(right, first_token=0),
        "d2t dropped": with_weights(d2t=torch.zeros_like(drafter.d2t)),
        "d2t of target ids": with_weights(d2t=ids.clone()),
        "head missing": with_weights(lm_head__weight=random_head),
        "head of the target's first rows": with_weights(lm_head__weight=head[:rows]),
        "head of the target": with_weights(lm_head__weight=head[ids]),
        "embedding missing": with_weights(embed_tokens__weight=torch.zeros_like(embedding)),
        "embedding off by one row": with_weights(embed_tokens__weight=torch.cat([embedding[-1:], embedding[:-1]])),
        "norm_before_residual flipped": with_config(norm_before_residual=not drafter.config.norm_before_residual),
        "norm_output flipped": with_config(norm_output=not drafter.config.norm_output),
        "fc_norm ignored": with_config(fc_norm=False),
        "fc_norm wrongly on": with_config(fc_norm=True),
        "norm_before_fc ignored": with_config(norm_before_fc=False),
        "norm_before_fc wrongly on": with_config(norm_before_fc=True),
        "rope theta 10000": with_config(rope_parameters=drafter.config.rope_parameters | {"rope_theta": 10000.0}),
        "rope scaling ignored": with_config(
            rope_parameters=PLAIN | {"rope_theta": drafter.config.rope_parameters["rope_theta"]}
        ),
        "rope of the target": Engine(of_target, right),
        "positions not advanced": given(right, advance=0),
        "positions advanced twice": given(right, advance=2),
        "stale drafter cache": given(right, stale=True),
        "prompt missing in drafter cache": given(right, prompt_cached=False),
        "cliff after step 0": given(right, right_steps=1),
        "nothing accepted": given(right, right_steps=0),
        "float8 features": given(float8),
        "bfloat16 features": given(lambda states: right(states).bfloat16().float()),
    }


def rounded_to_float8(values):
    scale = values.abs().amax(-1, keepdim=True) / 448
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


@torch.no_grad()
def states_of(target, text) -> SimpleNamespace:
    """The target's residual stream, what each layer adds last, and the stream before that, each by boundary."""
    update, before = {}, {}
    hooks = []
    for k, layer in enumerate(target.model.layers, 1):
        hooks.append(layer.mlp.register_forward_hook(lambda _, __, out, k=k: update.update({k: out[0]})))
        keep_before = lambda _, args, k=k: before.update({k: args[0][0]})  # noqa: E731
        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(keep_before))
    every = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    residual = {k: states[0] for k, states in enumerate(every[:-1])}  # the last one is after the final norm
    return SimpleNamespace(residual=residual | {LAYERS: before[LAYERS] + update[LAYERS]}, update=update, before=before)


def with_everything(drafter: Drafter) -> Drafter:
    """One that has what the public one has not: other boundaries and norms, half a vocabulary, a rope unlike the target's."""
    config = drafter.config.with_(
        boundaries=(3, 6, 12),
        fc_norm=True,
        norm_before_fc=True,
        norm_output=True,
        draft_vocab_size=1024,
        rope_parameters=drafter.config.rope_parameters | {"rope_theta": 50000.0, "factor": 8.0},
    )
    ids = torch.arange(1024) * 2
    tensors = {"lm_head.weight": drafter.lm_head.weight[ids], "input_norm.weight": torch.linspace(0.2, 1.8, 384)}
    new = drafter.adapted(config, tensors)
    new.set_vocabulary(ids)
    return new


@pytest.fixture(scope="module", params=["public", "with everything"])
def case(request):
    """Two answers of the published run, replayed under every hypothesis, and what the engines of this file are made of."""
    target = targets.load(ROOT / "targets" / "tiny-mla")
    drafter = checkpoint.load_for("drafters/tiny-mla-public", "targets/tiny-mla", target)
    if request.param == "with everything":
        drafter = with_everything(drafter)
    published = ROOT / "reports" / "tiny_mla" / "data" / "benchmark" / "healthy" / "public" / "benchmark.json"
    requests = [(r["prompt_ids"], r["output_ids"][:70]) for r in json.loads(published.read_text())["requests"][:2]]
    texts = [prompt + output for prompt, output in requests]
    setups = hypotheses.hypotheses(drafter, changes.TargetParts.of(target))
    features = capture.capture(target, texts, drafter.config.boundaries, also=hypotheses.extra_streams(setups))
    found = hypotheses.replay_all(setups, hypotheses.texts_of(requests, features), None, STEPS)
    return SimpleNamespace(
        name=request.param,
        requests=requests,
        states=[states_of(target, text) for text in texts],
        found=found,
        engines=engines(drafter, target),
    )


@pytest.mark.slow
def test_all_are_tried_on_one_of_the_two(case):
    inapplicable = {
        "public": {
            "default boundaries",  # the drafter's own
            "last feature after the final norm",
            "d2t dropped",
            "d2t of target ids",
            "fc_norm ignored",
            "norm_before_fc ignored",
            "rope theta 10000",
            "rope of the target",
        },
        "with everything": {"boundaries +1", "fc_norm wrongly on", "norm_before_fc wrongly on"},
    }
    assert set(faults.FAULTS) - set(case.found) == inapplicable[case.name] | NOT_ON_THESE
    assert set(case.engines) == set(faults.FAULTS) - NOT_ON_THESE | {changes.HEALTHY}


@pytest.mark.parametrize("fault", [changes.HEALTHY, *(name for name in faults.FAULTS if name not in NOT_ON_THESE)])
def test_an_engine_with_the_fault_makes_the_rounds_of_its_hypothesis(case, fault):
    if fault not in case.found:
        pytest.skip("cannot show with this drafter")
    rounds = [
        case.engines[fault].rounds(prompt + output, len(prompt), states)
        for (prompt, output), states in zip(case.requests, case.states, strict=True)
    ]
    assert rounds == case.found[fault]


def test_the_rounds_tell_the_faults_from_a_healthy_engine(case):
    """What makes the test above worth something."""
    healthy = case.found[changes.HEALTHY]
    alike = {name for name, rounds in case.found.items() if rounds == healthy and name != changes.HEALTHY}
    assert sum(map(sum, healthy)) >= (60 if case.name == "public" else 15)
    unseen = {"public": set(), "with everything": {"positions not advanced", "float8 features"}}
    assert alike <= unseen[case.name] | {"bfloat16 features"}
