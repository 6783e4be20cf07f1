"""Replay: what a correct engine must have accepted, round by round, from its own tokens.

A greedy chain draft is accepted iff it equals the token that the engine emitted (at any temperature: the draft is
one-hot in rejection sampling, Leviathan et al. 2023, https://arxiv.org/abs/2211.17192). So the target's features of the
emitted tokens and the drafter's weights decide every round: a round that starts at slot t accepts the longest run of
steps k = 0, 1, ... with draft_k(t) = x[t+2+k]; the next round starts at t + accepted + 1. The first starts at the last
prompt token, since prefill itself emits x[prompt_len].

:func:`drafts` runs every step at every slot. :func:`counts_at` runs only the slots asked for, and each only as far as
its drafts are right: the same counts for a fraction of the work, under any :class:`Setup`, correct or broken.
"""

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafter.model import Drafter
from ..drafter.seam import Head, Layer, hidden_states
from ..targets.capture import NORMED, RESIDUAL, Stream, Without
from .rounds import compare as compare  # rounds and replay are used together
from .rounds import round_slots as round_slots
from .rounds import walk


def drafts(head: Head, fused: Tensor, token_ids: Tensor, steps: int) -> Tensor:
    """[B, T-1, steps] target ids that the drafter proposes at each slot and step, the earlier steps being right."""
    with torch.no_grad():
        return torch.stack([head.propose(output) for output in hidden_states(head, fused, token_ids, steps)], -1)


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
    counts: list[int] = (proposed == emitted).int().cumprod(-1).sum(-1).tolist()
    return counts


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


@dataclass(frozen=True)
class From:
    """An engine that drafts as ``before`` says, and from slot ``since`` of each answer on as ``setup`` says.

    Slot 0 of an answer is that of its first token. Keys and values of earlier slots stay those of ``before``.
    """

    setup: Setup
    before: Setup
    since: int


def correct(drafter: Drafter) -> Setup:
    """A correct engine."""
    return Setup(drafter, tuple((RESIDUAL, k) for k in drafter.config.boundaries))


def captured_for(setups: Iterable[Setup]) -> set[Stream]:
    """The streams that a forward pass must capture for these setups."""
    needed: set[Stream] = set()
    for kind, k in (source for setup in setups for source in setup.sources if source):
        if isinstance(kind, Without):
            needed |= {(RESIDUAL, k), (kind.part, k)}
        else:
            needed.add((RESIDUAL if kind == NORMED else kind, k))
    return needed


class Texts:
    """Texts laid end to end: one row for each slot (all positions of a text but its last).

    streams: {stream: [rows, Ht]}; tokens: [sum of T]; for each row: ``text`` its index, ``slot`` its position in it,
    ``of_answer`` its position in the answer, ``token`` where x[slot] stands in tokens; ``starts``: first row of each text,
    and one past the last.
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
        self.of_answer = self.slot - torch.tensor(prompt_lengths, device=device)[self.text]  # 0 at its first token
        self.prompt = self.of_answer < -1

    def ahead(self, rows: Tensor, offset: int) -> Tensor:
        """x[slot + offset] for each row; -1 past the text's end (0 where it is embedded, to be never compared)."""
        inside = offset < self.left[rows]
        return torch.where(inside, self.tokens[torch.where(inside, self.token[rows] + offset, 0)], -1)

    def source(self, source: Stream | None, rows: Tensor, final_norm: Callable[[Tensor], Tensor] | None) -> Tensor:
        """[rows, Ht] what an engine hands over at these rows."""
        if source is None:
            return torch.zeros_like(next(iter(self.streams.values()))[rows])
        kind, k = source
        if kind == NORMED:
            if final_norm is None:
                raise ValueError(f"source {source}: found no final_norm, expected the target's")
            return final_norm(self.streams[RESIDUAL, k][rows])
        if isinstance(kind, Without):
            return self.streams[RESIDUAL, k][rows] - self.streams[kind.part, k][rows]
        return self.streams[source][rows]


# Rows that drafting holds at once: a processor multiplies as many as fast as more, and their logits over a draft
# vocabulary of 32,000 are 125 MiB in float32.
ROWS = 1024
# Attention scores held at once, heads x rows x text: 64 MiB in float32, and fewer or more were no faster at 64 heads.
SCORES = 2**24

States = tuple[Tensor, Tensor]  # keys and values [rows, kv heads, d]
Kept = tuple[Tensor, int, list[States]]  # indices into the rows asked for, a later step, its states by layer


def counts_at(
    setup: Setup | From, texts: Texts, slots: list[list[int]], steps: int, rounds: list[list[int]] | None = None
) -> list[list[int]]:
    """The accepted counts of rounds that start at ``slots`` of each text, for an engine that drafts as ``setup`` says.

    Args:
        setup: a stale cache cannot be one that begins in the middle of an answer.
        rounds: the engine's own accepted counts at those slots; only a stale cache depends on them (without them the
            walk of the replay itself is taken).
    Returns:
        for each text one count for each of its slots.
    """
    with torch.no_grad():
        return _counts_at(setup, texts, slots, steps, rounds)


def _counts_at(
    setup: Setup | From, texts: Texts, slots: list[list[int]], steps: int, rounds: list[list[int]] | None
) -> list[list[int]]:
    places = [texts.starts[i] + slot for i, some in enumerate(slots) for slot in some]
    rows = torch.tensor(places, dtype=torch.int64, device=texts.slot.device)
    if isinstance(setup, From):
        counts = _counts_from(setup, texts, rows, steps)
    elif setup.stale:
        counts = _most_right(setup, _stale_counts(_Run(setup, texts, steps), rows, slots, rounds))
    else:
        counts = _most_right(setup, _Run(setup, texts, steps).counts(rows))
    return [part.tolist() for part in counts.split([len(some) for some in slots])]


def _most_right(setup: Setup, counts: Tensor) -> Tensor:
    return counts if setup.right_steps is None else counts.clamp_max(setup.right_steps)


def _counts_from(setup: From, texts: Texts, rows: Tensor, steps: int) -> Tensor:
    before = _Run(setup.before, texts, steps)
    earlier = texts.of_answer < setup.since
    after = _Run(setup.setup, texts, steps, _Earlier(before, earlier))
    counts = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    is_earlier = earlier[rows]
    counts[is_earlier] = _most_right(setup.before, before.counts(rows[is_earlier]))
    counts[~is_earlier] = _most_right(setup.setup, after.counts(rows[~is_earlier]))
    return counts


def all_slots(texts: Texts) -> list[list[int]]:
    """The slots at which rounds of any engine can start: from the prompt's last one to the text's last."""
    return [list(range(p - 1, len(text) - 1)) for text, p in zip(texts.texts, texts.prompt_lengths, strict=True)]


def own_rounds(counts: list[list[int]], texts: Texts) -> list[list[int]]:
    """The rounds that the setup itself would have made, from its counts at :func:`all_slots`."""
    return [walk([0] * (p - 1) + some, p) for some, p in zip(counts, texts.prompt_lengths, strict=True)]


@dataclass
class _Earlier:
    """Rows [rows] that another run computes: its states stand in their place."""

    run: "_Run"
    rows: Tensor

    def over(self, theirs: Tensor, own: Tensor) -> Tensor:
        """``own`` [rows, ...], at the earlier rows ``theirs``."""
        return torch.where(self.rows.view(-1, *[1] * (own.dim() - 1)), theirs, own)


class _Run:
    """One setup on one set of texts: keys and values of step 0 for every row, then drafting on demand.

    Held for every row: ``entering``, [rows, H] what enters each layer at step 0, and ``cache``, keys and values
    [rows, kv heads, d] of each layer. Everything else is made for ``ROWS`` rows at a time.
    """

    def __init__(self, setup: Setup, texts: Texts, steps: int, earlier: _Earlier | None = None):
        self.setup, self.texts, self.steps = setup, texts, steps
        self.head: Head = setup.drafter
        self.layers: list[Layer] = list(self.head.layers)
        self.rows = torch.arange(len(texts.slot), device=texts.slot.device)
        self.chunks = self.rows.split(ROWS)
        self.cache: list[States] = []
        self.entering: list[Tensor] = []
        (self.hidden,) = self._joined((self._fused(rows),) for rows in self.chunks)
        for index, layer in enumerate(self.layers):
            if earlier:
                self.hidden = earlier.over(earlier.run.entering[index], self.hidden)
            self.entering.append(self.hidden)
            states = self._joined(self._states(layer, rows) for rows in self.chunks)
            if earlier:
                pairs = zip(earlier.run.cache[index], states, strict=True)
                states = tuple(earlier.over(theirs, own) for theirs, own in pairs)
            self.cache.append(states)
            if layer is not self.layers[-1]:
                (self.hidden,) = self._joined((self._layer(index, rows),) for rows in self.chunks)

    def _joined(self, parts: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Tensors of all rows from those of each chunk, each copied to its place as it comes."""
        whole: tuple[Tensor, ...] = ()
        for rows, some in zip(self.chunks, parts, strict=True):
            whole = whole or tuple(tensor.new_empty(len(self.rows), *tensor.shape[1:]) for tensor in some)
            for tensor, part in zip(whole, some, strict=True):
                tensor[rows] = part
        return whole

    def _fused(self, rows: Tensor) -> Tensor:
        setup = self.setup
        if setup.lag:
            rows = rows - self.texts.slot[rows].clamp_max(setup.lag)
        parts = [self.texts.source(source, rows, setup.final_norm) for source in setup.sources]
        if setup.rounding:
            parts = [setup.rounding(part) for part in parts]
        features = torch.cat(parts, -1)
        return self.head.fuse(features) if setup.through_fc else features.to(self.head.dtype)

    def _enter(self, layer: Layer, rows: Tensor, hidden: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """What ``hidden`` [rows, H] is to the layer beside the embeds of x[slot + offset]: its inputs and its residual."""
        embeds = self.head.embed(self.texts.ahead(rows, offset).clamp_min(0), hidden)
        return layer.enter(embeds[None], hidden[None])

    def _enter_first(self, layer: Layer, rows: Tensor) -> tuple[Tensor, Tensor]:
        """At step 0, of the layer that ``self.hidden`` enters."""
        return self._enter(layer, rows, self.hidden[rows], self.setup.first_token)

    def _states(self, layer: Layer, rows: Tensor) -> States:
        """Keys and values of step 0, as an engine holds them when it drafts."""
        inputs, _ = self._enter_first(layer, rows)
        keys, values = _by_row(layer.states(inputs, self.head.rope(inputs, self.texts.slot[rows][None])))
        if not self.setup.prompt_cached:
            in_prompt = self.texts.prompt[rows, None, None]
            keys, values = keys.masked_fill(in_prompt, 0), values.masked_fill(in_prompt, 0)
        return keys, values

    def counts(self, rows: Tensor, keep: list[Kept] | None = None) -> Tensor:
        """Accepted counts [rows]. ``keep`` collects the states of later steps."""
        counts = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        for some in torch.arange(len(rows), device=rows.device).split(ROWS):
            self._count(rows, some, counts, keep)
        return counts

    def _count(self, rows: Tensor, alive: Tensor, counts: Tensor, keep: list[Kept] | None) -> None:
        """Fill ``counts`` [rows] at the indices ``alive``."""
        hidden: Tensor | None = None
        own: list[list[States]] = [[] for _ in self.layers]  # for each layer: keys and values of steps 1, 2, ...
        for step in range(self.steps):
            at = rows[alive]
            hidden = self._step(step, at, hidden, own)
            if step and keep is not None:
                keep.append((alive, step, [some[-1] for some in own]))
            output, following = self.head.finish(hidden, step)
            right = self.head.propose(output) == self.texts.ahead(at, 2 + step)
            alive = alive[right]
            if not len(alive):
                break
            counts[alive] += 1
            hidden = following[right]
            own = [[(keys[right], values[right]) for keys, values in some] for some in own]

    def _step(self, step: int, rows: Tensor, hidden: Tensor | None, own: list[list[States]]) -> Tensor:
        """One drafting step of the rounds at ``rows``: their residual stream [rows, H] after the last layer.

        hidden: [rows, H] of the step before; None at step 0, whose layers but the last ran for every row already.
        """
        if hidden is None:
            return self._layer(len(self.layers) - 1, rows) if self.layers else self.hidden[rows]
        positions = self.texts.slot[rows] + step * self.setup.advance
        for index, layer in enumerate(self.layers):
            inputs, residual = self._enter(layer, rows, hidden, 1 + step)
            rope = self.head.rope(inputs, positions[None])
            own[index].append(_by_row(layer.states(inputs, rope)))
            mixed = self._attend(layer.query(inputs, rope), rows, index, own[index])
            hidden = layer.leave(residual, mixed)[0]
        return hidden

    def _layer(self, index: int, rows: Tensor) -> Tensor:
        """Step 0 of the layer that ``self.hidden`` enters: the residual stream [rows, H] after it."""
        layer = self.layers[index]
        inputs, residual = self._enter_first(layer, rows)
        query = layer.query(inputs, self.head.rope(inputs, self.texts.slot[rows][None]))
        return layer.leave(residual, self._attend(query, rows, index, []))[0]

    def _attend(self, query: Tensor, rows: Tensor, index: int, own: list[States]) -> Tensor:
        """Attention of each row over step 0 of its text's slots up to its own, and over its own later steps.

        query: [1, heads, rows, d]. ``rows`` must rise within each text, and texts too. Returns [1, heads, rows, d of values].
        """
        keys, values = self.cache[index]
        heads, wide = query.shape[1], values.shape[-1]
        if not wide:
            return query[..., :0]  # a layer without attention
        query = query[0].transpose(0, 1) * self.layers[index].scale
        query = query.unflatten(1, (keys.shape[1], -1))
        mixed = query.new_empty(*query.shape[:3], wide)
        places = rows.tolist()
        bounds = [bisect.bisect_left(places, start) for start in self.texts.starts]
        for start, first, last in zip(self.texts.starts, bounds, bounds[1:], strict=False):
            while first < last:
                longest = places[last - 1] + 1 - start
                part = slice(first, min(last, first + max(1, SCORES // (heads * longest))))
                seen = slice(start, places[part.stop - 1] + 1)
                later = [(some_keys[part], some_values[part]) for some_keys, some_values in own]
                mixed[part] = _mixed(query[part], rows[part] - start, keys[seen], values[seen], later)
                first = part.stop
        return mixed.flatten(1, 2).transpose(0, 1)[None]


def _by_row(states: States) -> States:
    """Keys and values [1, kv heads, rows, d] -> [rows, kv heads, d]."""
    keys, values = states
    return keys[0].transpose(0, 1), values[0].transpose(0, 1)


def _mixed(query: Tensor, slots: Tensor, keys: Tensor, values: Tensor, own: list[States]) -> Tensor:
    """Attention of some rows of one text; one tensor [kv heads, rows x group, text] is all that grows with the text.

    Args:
        query: [rows, kv heads, group, d], scaled. slots: [rows], rising; each row sees the text up to its own.
        keys, values: [text, kv heads, d], up to the last row's slot.
        own: keys and values [rows, kv heads, d] of each later step, for its own row only.
    Returns:
        [rows, kv heads, group, d of values]
    """
    rows, _, group, _ = query.shape
    scores = (query.transpose(0, 1).flatten(1, 2) @ keys.permute(1, 2, 0)).float()
    if rows > 1:
        unseen_by_some = int(slots[0]) + 1
        future = torch.arange(unseen_by_some, len(keys), device=slots.device) > slots[:, None]
        scores.unflatten(1, (rows, group))[..., unseen_by_some:].masked_fill_(future[:, None], float("-inf"))
    own_scores = [torch.einsum("nkgd,nkd->kng", query, some).flatten(1)[..., None].float() for some, _ in own]
    highest = torch.cat([scores.amax(-1, keepdim=True), *own_scores], -1).amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    mixed = (weights.to(values.dtype) @ values.transpose(0, 1)).float()
    for own_score, (_, some) in zip(own_scores, own, strict=True):
        weight = (own_score - highest).exp()
        total = total + weight
        mixed = mixed + weight * some.transpose(0, 1).repeat_interleave(group, 1)
    return (mixed / total).to(query.dtype).unflatten(1, (rows, group)).transpose(0, 1)


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
        keep: list[Kept] = []
        counts[now] = run.counts(rows[now], keep)
        accepted = [
            rounds[text][places[text] - firsts[text]] if rounds else int(counts[places[text]]) for text in open_
        ]
        _leave_stale(run, rows[now], torch.tensor(accepted, device=rows.device), keep)
        for text, count in zip(open_, accepted, strict=True):
            places[text] += 1 if rounds else count + 1
    return counts


def _leave_stale(run: _Run, rows: Tensor, accepted: Tensor, keep: list[Kept]) -> None:
    for index, step, states in keep:
        inside = step <= accepted[index]
        for (keys, values), (own_keys, own_values) in zip(run.cache, states, strict=True):
            keys[rows[index[inside]] + step] = own_keys[inside]
            values[rows[index[inside]] + step] = own_values[inside]
    unwritten = rows[(accepted == run.steps) & (run.texts.left[rows] > run.steps + 1)] + run.steps
    for keys, values in run.cache:
        keys[unwritten], values[unwritten] = 0, 0
