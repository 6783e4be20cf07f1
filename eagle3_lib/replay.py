"""Replay: what a correct engine must have accepted, round by round, from its own tokens.

A greedy chain draft is accepted iff it equals the token that the engine emitted (at any temperature: the draft is
one-hot in rejection sampling, Leviathan et al. 2023, https://arxiv.org/abs/2211.17192). So the target's features of the
emitted tokens and the drafter's weights decide every round: a round that starts at slot t accepts the longest run of
steps k = 0, 1, ... with draft_k(t) = x[t+2+k]; the next round starts at t + accepted + 1. The first starts at the last
prompt token, since prefill itself emits x[prompt_len].

:func:`drafts` runs every step at every slot. :func:`counts_at` runs only the slots asked for, and each only as far as
its drafts are right: the same counts for a fraction of the work, under any :class:`Setup`, correct or broken.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import acceptance, checkpoint, measured, targets
from .drafter import Drafter
from .errors import Eagle3Error
from .params import ReplayParams
from .provenance import project_path, stage, write_json

Stream = tuple[str, int]
RESIDUAL, UPDATE = (
    "residual",
    "update",
)  # the residual stream at a boundary; what the layer before it added last (its MLP)
NORMED, BEFORE_UPDATE = (
    "normed",
    "before update",
)  # made of those two: after the target's final norm; without the update


@dataclass
class Features:
    """What one forward pass of the target gives for one text.

    fused: [T, boundaries x Ht] residual streams, in the order of the boundaries; last_hidden: [T, Ht] after the final
    norm; argmax: [T] the target's greedy next token at each position; streams: [T, Ht] for each captured stream;
    draft_mass: [T] the probability that the target gives to the draft vocabulary, where that was asked for.
    """

    fused: Tensor
    last_hidden: Tensor
    argmax: Tensor
    streams: dict[Stream, Tensor] = field(default_factory=dict)
    draft_mass: Tensor | None = None


@torch.no_grad()
def capture(
    target,
    texts: list[list[int]],
    boundaries: Iterable[int],
    tokens_per_pass: int = 4096,
    also: Iterable[Stream] = (),
    draft_ids: Tensor | None = None,
) -> Iterable[Features]:
    """Run the target over token sequences and keep its residual stream at the boundaries.

    Boundary k is the input of decoder layer k; the last one, the output of the last layer before the final norm. Texts
    are padded on the right to the longest of a pass; with causal attention padding never reaches a real position.

    Args:
        also: further streams (RESIDUAL or UPDATE at a boundary) that hypotheses need; see :func:`captured_for`.
        draft_ids: target ids of the draft vocabulary, for ``draft_mass``.
    Yields:
        :class:`Features` for each text, in order.
    """
    boundaries = list(boundaries)
    wanted = list(dict.fromkeys([*((RESIDUAL, k) for k in boundaries), *also]))
    seen: dict[Stream, Tensor] = {}
    hooks = [_hook(target.base_model.layers, stream, seen) for stream in wanted]
    try:
        for group in _passes(texts, tokens_per_pass):
            length = max(len(text) for text in group)
            ids = torch.tensor([text + [0] * (length - len(text)) for text in group], device=target.device)
            mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in group], device=target.device)
            hidden = target.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state
            lengths = [len(text) for text in group]
            argmax, mass = choices(target.lm_head, hidden[mask.bool()], draft_ids)
            masses = [None] * len(group) if mass is None else mass.split(lengths)
            for row, (n, ids_of, mass_of) in enumerate(zip(lengths, argmax.split(lengths), masses, strict=True)):
                streams = {stream: values[row, :n] for stream, values in seen.items()}
                fused = torch.cat([streams[RESIDUAL, k] for k in boundaries], -1)
                yield Features(fused, hidden[row, :n], ids_of, streams, mass_of)
    finally:
        for hook in hooks:
            hook.remove()


def choices(
    head: Callable, last_hidden: Tensor, draft_ids: Tensor | None = None, rows: int = 1024, slice_rows: int = 64
):
    """([T] greedy ids, [T] float32 probability of the draft vocabulary or None).

    ``rows`` positions' logits are held at a time, and exponentials of ``slice_rows``, few enough for a processor's cache.
    """
    argmax, mass, among = [], [], None
    for hidden in last_hidden.split(rows):
        logits = head(hidden)
        if draft_ids is None:
            argmax.append(logits.argmax(-1))
            continue
        if among is None:  # [V, 2] of 0 and 1: the draft vocabulary, and all
            among = torch.ones(logits.shape[-1], 2, device=logits.device)
            among[:, 0] = torch.zeros_like(among[:, 1]).index_fill(0, draft_ids, 1)
        for part in logits.split(slice_rows):
            top, ids = part.max(-1, keepdim=True)
            drafted, total = ((part.float() - top).exp_() @ among).unbind(-1)
            argmax.append(ids.squeeze(-1))
            mass.append(drafted / total)
    return torch.cat(argmax), torch.cat(mass) if mass else None


def _hook(layers, stream: Stream, seen: dict[Stream, Tensor]):
    """Put ``stream`` into ``seen`` whenever the target runs."""
    kind, boundary = stream

    def keep(_, __, output):
        seen[stream] = output[0] if isinstance(output, tuple) else output

    def keep_input(_, args, kwargs):
        seen[stream] = args[0] if args else kwargs["hidden_states"]

    if kind == UPDATE:
        return layers[boundary - 1].mlp.register_forward_hook(keep)
    if boundary == len(layers):
        return layers[-1].register_forward_hook(keep)
    return layers[boundary].register_forward_pre_hook(keep_input, with_kwargs=True)


def _passes(texts: list[list[int]], tokens_per_pass: int) -> Iterable[list[list[int]]]:
    group: list[list[int]] = []
    for text in texts:
        if group and (len(group) + 1) * max(len(text), *map(len, group)) > tokens_per_pass:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


@torch.no_grad()
def drafts(drafter: Drafter, fused: Tensor, token_ids: Tensor, steps: int) -> Tensor:
    """[B, T-1, steps] target ids that the drafter proposes at each slot and step, the earlier steps being right."""
    target_ids = drafter.target_ids
    return torch.stack([target_ids[logits.argmax(-1)] for logits in drafter.unroll(fused, token_ids, steps)], -1)


def accepted_at(proposed: Tensor, token_ids: list[int]) -> list[int]:
    """The accepted count of a round that started at each slot.

    Args:
        proposed: [T-1, steps] target ids of :func:`drafts` for one text.
        token_ids: the T tokens of the text.
    Returns:
        T-1 counts; near the end only as far as the text reaches.
    """
    slots, steps = proposed.shape
    text = torch.tensor(token_ids[2:] + [-1] * steps, device=proposed.device)
    emitted = text.unfold(0, steps, 1)[:slots]
    return (proposed == emitted).int().cumprod(-1).sum(-1).tolist()


def walk(accepted: list[int], prompt_length: int) -> list[int]:
    """The rounds of a correct engine: accepted counts from the prompt's last slot on, until the text is all emitted."""
    rounds, slot = [], prompt_length - 1
    while slot < len(accepted) - 1:  # the last slot has nothing left to emit
        rounds.append(accepted[slot])
        slot += accepted[slot] + 1
    return rounds


def compare(engine_rounds: list[int], accepted: list[int], prompt_length: int, steps: int) -> list[dict]:
    """Each of the engine's rounds beside what the replay says of a round at the same slot.

    Returns:
        for each round {"slot", "engine", "replay", "cut"}; ``cut``: the text ends inside the round's drafts, so that the
        engine may have accepted tokens that it never emitted.
    """
    rows, slot = [], prompt_length - 1
    for count in engine_rounds:
        replayed = accepted[slot] if slot < len(accepted) else 0
        rows.append({"slot": slot, "engine": count, "replay": replayed, "cut": slot + 1 + steps > len(accepted)})
        slot += count + 1
    return rows


# ------------------------------------------------------------------------------------------- replay under a hypothesis


@dataclass(frozen=True)
class Setup:
    """How an engine computes its drafts: the drafter as it runs there, and everything around it that can be wrong.

    sources: what the engine hands over in the place of each boundary, in order; None is zeros. The defaults of the other
    fields are a correct engine's.
    """

    drafter: Drafter
    sources: tuple[Stream | None, ...]
    final_norm: Callable[[Tensor], Tensor] | None = None  # the target's, for NORMED sources
    rounding: Callable[[Tensor], Tensor] | None = None  # what the transfer does to the values of each source
    through_fc: bool = True  # False: the one source is taken as the hidden state itself
    lag: int = 0  # slot t gets the features of slot t - lag
    first_token: int = 1  # step 0 at slot t embeds x[t + first_token]
    advance: int = 1  # the rope position of step k at slot t is t + k * advance
    prompt_cached: bool = True  # False: keys and values of the prompt's slots, but for its last, are zeros
    stale: bool = False  # slots inside an accepted run keep the drafter's own states of that run
    right_steps: int | None = None  # drafts from this step on are never right


def correct(drafter: Drafter) -> Setup:
    """A correct engine."""
    return Setup(drafter, tuple((RESIDUAL, k) for k in drafter.config.boundaries))


def captured_for(setups: Iterable[Setup]) -> set[Stream]:
    """The streams that a forward pass must capture for these setups."""
    needed = set()
    for kind, k in (source for setup in setups for source in setup.sources if source):
        needed |= {(UPDATE, k)} if kind in (UPDATE, BEFORE_UPDATE) else set()
        needed |= {(RESIDUAL, k)} if kind != UPDATE else set()
    return needed


class Texts:
    """Texts laid end to end: one row for each slot (all positions of a text but its last).

    streams: {stream: [rows, Ht]}; tokens: [sum of T]; for each row: ``text`` its index, ``slot`` its position in it,
    ``token`` where x[slot] stands in tokens; ``starts``: first row of each text, and one past the last.
    """

    def __init__(self, texts: list[list[int]], prompt_lengths: list[int], streams: list[dict[Stream, Tensor]]):
        self.texts, self.prompt_lengths = texts, prompt_lengths
        self.streams = {name: torch.cat([s[name][:-1] for s in streams]) for name in streams[0]}
        device = next(iter(self.streams.values())).device
        lengths = torch.tensor([len(text) for text in texts])
        self.text = torch.repeat_interleave(torch.arange(len(texts)), lengths - 1).to(device)
        self.starts = [0, *(lengths - 1).cumsum(0).tolist()]
        self.slot = torch.cat([torch.arange(n - 1) for n in lengths.tolist()]).to(device)
        self.token = torch.arange(len(self.slot), device=device) + self.text
        self.tokens = torch.tensor([token for text in texts for token in text], device=device)
        self.left = (lengths.to(device)[self.text]) - self.slot  # tokens of the text from the slot on
        self.prompt = self.slot < torch.tensor(prompt_lengths, device=device)[self.text] - 1

    def ahead(self, rows: Tensor, offset: int) -> Tensor:
        """x[slot + offset] for each row; -1 past the text's end (0 where it is embedded, to be never compared)."""
        inside = offset < self.left[rows]
        return torch.where(inside, self.tokens[torch.where(inside, self.token[rows] + offset, 0)], -1)

    def source(self, source: Stream | None, final_norm) -> Tensor:
        if source is None:
            return torch.zeros_like(next(iter(self.streams.values())))
        kind, k = source
        if kind == NORMED:
            return final_norm(self.streams[RESIDUAL, k])
        if kind == BEFORE_UPDATE:
            return self.streams[RESIDUAL, k] - self.streams[UPDATE, k]
        return self.streams[source]


@torch.no_grad()
def counts_at(
    setup: Setup, texts: Texts, slots: list[list[int]], steps: int, rounds: list[list[int]] | None = None
) -> list[list[int]]:
    """The accepted counts of rounds that start at ``slots`` of each text, for an engine that drafts as ``setup`` says.

    Args:
        rounds: the engine's own accepted counts at those slots; only a stale cache depends on them (without them the
            walk of the replay itself is taken).
    Returns:
        for each text one count for each of its slots.
    """
    rows = torch.tensor(
        [texts.starts[i] + slot for i, some in enumerate(slots) for slot in some], device=texts.slot.device
    )
    run = _Run(setup, texts, steps)
    if not setup.stale:
        counts = run.counts(rows)
    else:
        counts = _stale_counts(run, rows, slots, rounds)
    if setup.right_steps is not None:
        counts = counts.clamp_max(setup.right_steps)
    return [part.tolist() for part in counts.split([len(some) for some in slots])]


def all_slots(texts: Texts) -> list[list[int]]:
    """The slots at which rounds of any engine can start: from the prompt's last one to the text's last."""
    return [list(range(p - 1, len(text) - 1)) for text, p in zip(texts.texts, texts.prompt_lengths, strict=True)]


def own_rounds(counts: list[list[int]], texts: Texts) -> list[list[int]]:
    """The rounds that the setup itself would have made, from its counts at :func:`all_slots`."""
    return [walk([0] * (p - 1) + some, p) for some, p in zip(counts, texts.prompt_lengths, strict=True)]


def round_slots(rounds: list[int], prompt_length: int) -> list[int]:
    """The slots at which an engine's rounds start."""
    slots, slot = [], prompt_length - 1
    for count in rounds:
        slots.append(slot)
        slot += count + 1
    return slots


class _Run:
    """One setup on one set of texts: keys and values of step 0 for every row, then drafting on demand."""

    def __init__(self, setup: Setup, texts: Texts, steps: int):
        self.setup, self.texts, self.steps, self.drafter = setup, texts, steps, setup.drafter
        self.layers = list(setup.drafter.layers)
        self.rows = torch.arange(len(texts.slot), device=texts.slot.device)
        self.embeds = self.drafter.embed_tokens(texts.ahead(self.rows, setup.first_token).clamp_min(0))
        hidden = self._features()
        self.entered, self.cache = [], []  # for each layer: its input [rows, ...] and residual; keys and values
        for layer in self.layers:
            inputs, residual = _enter(layer, self.embeds, hidden)
            query, keys, values = self._project(layer, inputs, texts.slot)
            if not setup.prompt_cached:
                keys, values = (states.masked_fill(texts.prompt[:, None, None], 0) for states in (keys, values))
            self.entered.append((inputs, residual))
            self.cache.append((keys, values))
            if layer is not self.layers[-1]:
                hidden = _leave(layer, residual, self._attend(query, self.rows, len(self.cache) - 1, []))

    def _features(self) -> Tensor:
        setup = self.setup
        parts = [self.texts.source(source, setup.final_norm) for source in setup.sources]
        if setup.rounding:
            parts = [setup.rounding(part) for part in parts]
        features = torch.cat(parts, -1).to(self.drafter.fc.weight.dtype)
        if setup.lag:
            features = features[self.rows - self.texts.slot.clamp_max(setup.lag)]
        return self.drafter.fuse(features) if setup.through_fc else features

    def _project(self, layer, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [rows, heads, d], scaled, and keys and values [rows, kv heads, d] at rope positions [rows]."""
        rope = self.drafter.rotary(inputs, positions[None])
        query, keys, values = (states[0].transpose(0, 1) for states in layer.self_attn.project(inputs[None], rope))
        return query * layer.self_attn.scale, keys, values

    def counts(self, rows: Tensor, keep: list | None = None) -> Tensor:
        """Accepted counts [rows]. ``keep`` collects (index into rows, step, keys and values by layer) of later steps."""
        counts = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        alive = torch.arange(len(rows), device=rows.device)
        hidden: Tensor | None = None
        own: list[list] = [[] for _ in self.layers]  # for each layer: keys and values of steps 1, 2, ...
        for step in range(self.steps):
            at = rows[alive]
            hidden = self._step(step, at, hidden, own)
            if step and keep is not None:
                keep.append((alive, step, [some[-1] for some in own]))
            output = self.drafter.norm(hidden)
            proposed = self.drafter.target_ids[self.drafter.lm_head(output).argmax(-1)]
            right = proposed == self.texts.ahead(at, 2 + step)
            alive = alive[right]
            if not len(alive):
                break
            counts[alive] += 1
            hidden = (output if self.drafter.config.norm_output else hidden)[right]
            own = [[(keys[right], values[right]) for keys, values in some] for some in own]
        return counts

    def _step(self, step: int, rows: Tensor, hidden: Tensor | None, own: list[list]) -> Tensor:
        """One drafting step of the rounds at ``rows``: their residual stream [rows, H] after the last layer."""
        positions = self.texts.slot[rows] + step * self.setup.advance
        if step:
            embeds = self.drafter.embed_tokens(self.texts.ahead(rows, 1 + step).clamp_min(0))
        for index, layer in enumerate(self.layers):
            if step == 0 and layer is not self.layers[-1]:
                continue  # ran for every row already
            inputs, residual = _enter(layer, embeds, hidden) if step else (part[rows] for part in self.entered[index])
            query, keys, values = self._project(layer, inputs, positions)
            if step:
                own[index].append((keys, values))
            hidden = _leave(layer, residual, self._attend(query, rows, index, own[index]))
        return hidden

    def _attend(self, query: Tensor, rows: Tensor, index: int, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of each row over step 0 of its text's slots up to its own, and over its own later steps.

        ``rows`` must rise within each text, and texts too. Returns [rows, heads x d].
        """
        keys, values = self.cache[index]
        query = query.unflatten(1, (keys.shape[1], -1))
        mixed = query.new_empty(*query.shape[:3], values.shape[-1])
        own_scores = [torch.einsum("nkgd,nkd->nkg", query, some)[..., None] for some, _ in own]
        bounds = torch.searchsorted(rows, torch.tensor(self.texts.starts, device=rows.device)).tolist()
        for start, first, last in zip(self.texts.starts, bounds, bounds[1:], strict=False):
            if first == last:
                continue
            end = int(rows[last - 1]) + 1
            scores = torch.einsum("nkgd,skd->nkgs", query[first:last], keys[start:end])
            future = self.rows[start:end] > rows[first:last, None]
            scores = scores.masked_fill(future[:, None, None], float("-inf"))
            weights = (
                torch.cat([scores, *(some[first:last] for some in own_scores)], -1).float().softmax(-1).to(query.dtype)
            )
            mixed[first:last] = torch.einsum("nkgs,skd->nkgd", weights[..., : end - start], values[start:end])
            for step, (_, some) in enumerate(own):
                mixed[first:last] += weights[..., end - start + step, None] * some[first:last, :, None]
        return mixed.flatten(1)


def _enter(layer, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What a decoder layer's attention takes, and the residual that its output is added to."""
    if not layer.first:
        return layer.input_layernorm(hidden), hidden
    normed = layer.hidden_norm(hidden)
    inputs = torch.cat([layer.input_layernorm(embeds), normed], -1)
    return inputs, normed if layer.norm_before_residual else hidden


def _leave(layer, residual: Tensor, mixed: Tensor) -> Tensor:
    hidden = residual + layer.self_attn.o_proj(mixed)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _stale_counts(run: _Run, rows: Tensor, slots: list[list[int]], rounds: list[list[int]] | None) -> Tensor:
    """Counts with the drafter's own states left in the cache, at slots s+1 .. s+a of a round at s with a accepted.

    Drafting writes slots up to s+K-1; after K accepted, slot s+K was never written (zeros). Rounds depend on the rounds
    before them, so they run one after the other, all texts at once. Without ``rounds`` only the slots that the replay's
    own walk passes are counted; the others stay 0.
    """
    counts = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    firsts = [0, *torch.tensor([len(some) for some in slots]).cumsum(0).tolist()]  # of each text, as index into rows
    places = list(firsts[:-1])
    while open_ := [text for text, place in enumerate(places) if place < firsts[text + 1]]:
        now = torch.tensor([places[text] for text in open_], device=rows.device)
        keep: list = []
        counts[now] = run.counts(rows[now], keep)
        accepted = [
            rounds[text][places[text] - firsts[text]] if rounds else int(counts[places[text]]) for text in open_
        ]
        _leave_stale(run, rows[now], torch.tensor(accepted, device=rows.device), keep)
        for text, count in zip(open_, accepted, strict=True):
            places[text] += 1 if rounds else count + 1
    return counts


def _leave_stale(run: _Run, rows: Tensor, accepted: Tensor, keep: list) -> None:
    for index, step, states in keep:
        inside = step <= accepted[index]
        for (keys, values), (own_keys, own_values) in zip(run.cache, states, strict=True):
            keys[rows[index[inside]] + step] = own_keys[inside]
            values[rows[index[inside]] + step] = own_values[inside]
    unwritten = rows[(accepted == run.steps) & (run.texts.left[rows] > run.steps + 1)] + run.steps
    for keys, values in run.cache:
        keys[unwritten], values[unwritten] = 0, 0


def run(params: ReplayParams) -> dict:
    """Stage 08: replay one drafter on the tokens that the engine emitted, and lay its rounds beside the engine's.

    Returns:
        {"drafter", "engine", "target", "positions", "requests": as :func:`eagle3_lib.faults.examine`, "agreement": {"rounds",
        "equal", "cut", "tokens_not_greedy"}, "engine_acceptance", "replay_acceptance"}. Also in replay.json.
    Raises:
        Eagle3Error: the benchmark is missing, was of plain or n-gram decoding, or of another target.
    """
    from . import faults  # which builds on this module

    bench = measured.read(params.benchmark)
    positions = bench["positions"]
    if not positions or any(request["accepted"] is None for request in bench["requests"]):
        raise Eagle3Error(
            f"{params.benchmark}/benchmark.json: mode {bench['mode']!r} has no rounds; expected a drafter's run"
        )
    if bench["target"] != params.target:
        raise Eagle3Error(
            f"{params.benchmark}/benchmark.json: target: found {bench['target']!r}, expected {params.target!r}"
        )
    inputs = {"benchmark": project_path(params.benchmark) / "benchmark.json", "drafter": project_path(params.drafter)}
    with stage("replay", params, inputs) as notes:
        dtype = getattr(torch, params.dtype)
        target = targets.load(targets.resolve(params.target), dtype, params.device)
        drafter = checkpoint.load_for(params.drafter, params.target, target, dtype)
        requests = faults.examine(target, drafter, bench["requests"], positions)
        rows = [row for request in requests for row in request["rows"]]
        unequal = [row for row in rows if row["engine"] != row["replay"]]
        result = {
            "drafter": params.name,
            "engine": params.engine,
            "target": params.target,
            "positions": positions,
            "requests": requests,
            "agreement": {
                "rounds": len(rows),
                "equal": len(rows) - len(unequal),
                "cut": sum(row["cut"] for row in unequal),
                "tokens_not_greedy": sum(request["lossless"] for request in requests),
            },
            "engine_acceptance": acceptance.summary([r["engine_rounds"] for r in requests], positions),
            "replay_acceptance": acceptance.summary([r["replay_rounds"] for r in requests], positions),
        }
        write_json(project_path(params.out) / "replay.json", result)
        notes |= result["agreement"]
    return result
