"""Engines with faults that the catalogue does not have, or that hold in some places only: what does diagnose say of them?

    python benchmarks/outside_catalogue.py            record what is missing, then judge
    python benchmarks/outside_catalogue.py --record   record only
    python benchmarks/outside_catalogue.py --judge    judge the records that exist, start no engine

``OUTSIDE`` are faults that no entry of eagle3_lib/verdict/faults.py describes; the right verdict on one is a fault of the engine
that is not in the catalogue, or none where it changes too few rounds to be seen. ``PARTIAL`` are faults of the catalogue
that hold only from token 60 of each answer on, or only in every second request. The real vLLM runs them
(benchmarks/engine_runs.py) with three pairs of drafter and texts. Writes benchmarks/results/outside_catalogue.json.
"""

import argparse
import datetime
import json
from collections.abc import Callable

import engine_runs
import torch
import verdicts
from engine_runs import BASE_PYTHON, FINETUNED_PYTHON, HEALTHY, LONG, LONG_HEALTHY, OWN_TEXT, PAIRS, Engine, Pair, Run
from torch import Tensor

from eagle3_lib.engines.inside.broken import _proposer
from eagle3_lib.engines.shims import Injection, Tensors
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.paths import project_path
from eagle3_lib.verdict import diagnose

HEAD = 64  # dimensions of an attention head of the drafters here
SINCE = 60
FROM, HALF = f"from token {SINCE}", "in half of the requests"
ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"


# ------------------------------------------------------------------------------------------------- faults of the weights


def scaled(name: str, factor: float) -> Injection:
    return Injection(tensors=lambda tensors, _: {name: tensors[name] * factor})


def middle_block_doubled(tensors: Tensors, _) -> Tensors:
    low, middle, high = tensors["fc.weight"].chunk(3, 1)
    return {"fc.weight": torch.cat([low, 2 * middle, high], 1)}


def gate_and_up_swapped(tensors: Tensors, _) -> Tensors:
    gate, up = f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight"
    return {gate: tensors[up], up: tensors[gate]}


def output_heads_rolled(tensors: Tensors, _) -> Tensors:
    name = f"{ATTENTION}.o_proj.weight"
    return {name: tensors[name].roll(HEAD, 1)}


def first_value_head_zeroed(tensors: Tensors, _) -> Tensors:
    names = (f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight")
    edited = {name: tensors[name].clone() for name in names}
    for tensor in edited.values():
        tensor[:HEAD] = 0
    return edited


def interleaved_rotary(tensors: Tensors, _) -> Tensors:
    """Rows of queries and keys in the order of an engine that turns neighbours, in one that turns halves."""
    names = (f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.k_proj.weight")
    return {name: tensors[name].unflatten(0, (-1, HEAD // 2, 2)).transpose(1, 2).flatten(0, 2) for name in names}


def int4_weights(tensors: Tensors, _) -> Tensors:
    """All matrices but the head, rounded to 4 bits with one scale for each 32 columns of a row."""
    matrices = {name for name, tensor in tensors.items() if tensor.dim() == 2 and name != "lm_head.weight"}
    return {name: _int4(tensors[name]) for name in matrices}


def _int4(weight: Tensor, group: int = 32) -> Tensor:
    groups = weight.float().unflatten(1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1).to(weight.dtype)


def noisy_fc(tensors: Tensors, _) -> Tensors:
    weight = tensors["fc.weight"]
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return {"fc.weight": (weight + 0.2 * weight.float().std() * noise).to(weight.dtype)}


def unit_post_attention_norm(tensors: Tensors, _) -> Tensors:
    name = "midlayer.post_attention_layernorm.weight"
    return {name: torch.ones_like(tensors[name])}


# --------------------------------------------------------------------------------------------------- faults of the code


def halved_hidden_state() -> None:
    """The hidden state that step 1 gets from step 0 is halved."""
    proposer = _proposer()
    propose, update = proposer.propose, proposer._update_positions_dependent_metadata

    def patched_propose(self, **inputs):
        self.steps_made = 0
        model = self.model
        original = model.forward

        def forward(input_ids, positions, hidden_states, inputs_embeds=None):
            if self.steps_made == 1:
                hidden_states = hidden_states * 0.5
            return original(input_ids, positions, hidden_states, inputs_embeds)

        model.forward = forward
        try:
            return propose(self, **inputs)
        finally:
            del model.forward

    def patched_update(self, *inputs):
        self.steps_made += 1
        return update(self, *inputs)

    proposer.propose, proposer._update_positions_dependent_metadata = patched_propose, patched_update


def cliff_after_step_1() -> None:
    """Drafts after the second are token 0."""
    proposer = _proposer()
    original = proposer.propose

    def patched(self, **inputs):
        drafts = original(self, **inputs)
        drafts[:, 2:] = 0
        return drafts

    proposer.propose = patched


def token_0_for_the_bonus_token() -> None:
    """Step 0 embeds token 0 where drafting starts, instead of the token that the target has just chosen."""
    proposer = _proposer()
    original = proposer.set_inputs_first_pass

    def patched(self, *, next_token_ids, **others):
        return original(self, next_token_ids=torch.zeros_like(next_token_ids), **others)

    proposer.set_inputs_first_pass = patched


def every_fourth_slot_unwritten() -> None:
    """Keys and values of slots 3, 7, 11 ... are never written to the drafter's cache (zeros)."""
    proposer = _proposer()
    first, update = proposer.set_inputs_first_pass, proposer._update_positions_dependent_metadata

    def patched_first(self, *, target_positions, **inputs):
        count, starts, metadata = first(self, target_positions=target_positions, **inputs)
        slots = metadata.slot_mapping.masked_fill(target_positions % 4 == 3, -1)
        return count, starts, metadata.replace(slot_mapping=slots)

    def patched_update(self, positions, metadata, batch, *others):
        advanced = update(self, positions, metadata, batch, *others)
        metadata.slot_mapping[advanced % 4 == 3] = -1
        return advanced

    proposer.set_inputs_first_pass, proposer._update_positions_dependent_metadata = patched_first, patched_update


def features_of_another_request() -> None:
    """Each request of a batch gets the features of the request before it, as far as those reach."""
    proposer = _proposer()
    original = proposer.propose

    def patched(self, *, target_hidden_states, common_attn_metadata, **inputs):
        starts = common_attn_metadata.query_start_loc.tolist()
        spans = [range(start, end) for start, end in zip(starts, starts[1:], strict=False)]
        rows = [
            before[min(offset, len(before) - 1)]
            for before, span in zip([spans[-1], *spans], spans, strict=False)
            for offset in range(len(span))
        ]
        features = target_hidden_states[torch.tensor(rows)]
        return original(self, target_hidden_states=features, common_attn_metadata=common_attn_metadata, **inputs)

    proposer.propose = patched


# ------------------------------------------------------------------------------------------------ faults in some places

Where = Callable[[Tensor, Tensor], Tensor]  # indices of requests and places in their answers -> where the fault holds
EVERYWHERE: Where = lambda index, place: torch.ones_like(place, dtype=torch.bool)  # noqa: E731
WHERE: dict[str, Where] = {
    FROM: lambda index, place: place >= SINCE,
    HALF: lambda index, place: index % 2 == 1,
}
EVERY = {FROM: 1, HALF: 2}  # the fault is in every request, or in every second one


def wrong_features(engine: Engine, where: Where, wrong: Callable[..., Tensor]) -> None:
    """Features are ``wrong(features, metadata, positions)`` at the slots where the fault holds."""
    proposer = _proposer()
    original = proposer.propose

    def patched(self, *, target_hidden_states, target_positions, common_attn_metadata, **inputs):
        holds = where(*engine.tokens(common_attn_metadata, target_positions))
        faulty = wrong(target_hidden_states, common_attn_metadata, target_positions)
        right = target_hidden_states[:, : faulty.shape[1]]
        return original(
            self,
            target_hidden_states=torch.where(holds[:, None], faulty, right),
            target_positions=target_positions,
            common_attn_metadata=common_attn_metadata,
            **inputs,
        )

    proposer.propose = patched


def late_features(slots: int):
    """A slot gets the features of the slot ``slots`` before it; the first slots of a text get those of its first."""

    def apply(engine: Engine, where: Where) -> None:
        seen: dict[str, Tensor] = {}

        def late(features: Tensor, metadata, positions: Tensor) -> Tensor:
            starts = metadata.query_start_loc.tolist()
            found = torch.empty_like(features)
            for row, request in enumerate(engine.runner.input_batch.req_ids[: metadata.num_reqs]):
                span = slice(starts[row], starts[row + 1])
                table = seen.setdefault(request, features.new_zeros(engine_runs.MODEL_LENGTH, features.shape[1]))
                table[positions[span]] = features[span]
                found[span] = table[(positions[span] - slots).clamp_min(0)]
            return found

        wrong_features(engine, where, late)

    return apply


def low_boundary_dropped(engine: Engine, where: Where) -> None:
    def dropped(features: Tensor, *_) -> Tensor:
        low, *others = features.chunk(3, 1)
        return torch.cat([torch.zeros_like(low), *others], 1)

    wrong_features(engine, where, dropped)


def first_two_swapped(engine: Engine, where: Where) -> None:
    def swapped(features: Tensor, *_) -> Tensor:
        low, middle, high = features.chunk(3, 1)
        return torch.cat([middle, low, high], 1)

    wrong_features(engine, where, swapped)


def later_boundaries(engine: Engine, where: Where) -> None:
    """The target hands over each boundary and the next one; the next ones are taken where the fault holds."""
    configured = engine.runner.model.model.aux_hidden_state_layers
    captured = sorted({k + by for k in configured for by in (0, 1)})
    engine.runner.model.set_aux_hidden_state_layers(tuple(captured))
    proposer = _proposer()
    original = proposer.propose

    def taken(streams: tuple[Tensor, ...], by: int) -> Tensor:
        return torch.cat([streams[captured.index(k + by)] for k in configured], 1)

    def patched(self, *, target_hidden_states, target_positions, common_attn_metadata, **inputs):
        streams = target_hidden_states.chunk(len(captured), 1)
        holds = where(*engine.tokens(common_attn_metadata, target_positions))
        return original(
            self,
            target_hidden_states=torch.where(holds[:, None], taken(streams, 1), taken(streams, 0)),
            target_positions=target_positions,
            common_attn_metadata=common_attn_metadata,
            **inputs,
        )

    proposer.propose = patched


def unshifted_tokens(engine: Engine, where: Where) -> None:
    """Step 0 embeds the token of the slot itself instead of the next one."""
    proposer = _proposer()
    original = proposer.set_inputs_first_pass

    def patched(self, *, target_token_ids, target_positions, cad, **others):
        result = original(self, target_token_ids=target_token_ids, target_positions=target_positions, cad=cad, **others)
        holds = where(*engine.tokens(cad, target_positions))
        own = self.input_ids[: len(target_token_ids)]
        own[holds] = target_token_ids[holds].to(own.dtype)
        return result

    proposer.set_inputs_first_pass = patched


def drafting_wrongly(engine: Engine, where: Where, metadata, starts: Tensor | None, positions: Tensor) -> Tensor:
    """For each request of a batch, whether the fault holds at the slot where its drafting starts."""
    at = metadata.query_start_loc[1:] - 1 if starts is None else starts
    indices, lengths = (torch.tensor(some) for some in engine.rows(metadata))
    return where(indices, positions[at.long()] - lengths)


def cliff(engine: Engine, where: Where) -> None:
    """Drafts after the first are token 0 in the rounds where the fault holds."""
    proposer = _proposer()
    original = proposer.propose

    def patched(self, *, target_positions, token_indices_to_sample, common_attn_metadata, **inputs):
        rows = drafting_wrongly(engine, where, common_attn_metadata, token_indices_to_sample, target_positions)
        drafts = original(
            self,
            target_positions=target_positions,
            token_indices_to_sample=token_indices_to_sample,
            common_attn_metadata=common_attn_metadata,
            **inputs,
        )
        drafts[rows, 1:] = 0
        return drafts

    proposer.propose = patched


def frozen_positions(engine: Engine, where: Where) -> None:
    """Every drafting step of the rounds where the fault holds rotates by the position of step 0."""
    proposer = _proposer()
    propose, update = proposer.propose, proposer._update_positions_dependent_metadata

    def patched_propose(self, *, target_positions, token_indices_to_sample, common_attn_metadata, **inputs):
        self.frozen = drafting_wrongly(engine, where, common_attn_metadata, token_indices_to_sample, target_positions)
        self.first_positions = None
        return propose(
            self,
            target_positions=target_positions,
            token_indices_to_sample=token_indices_to_sample,
            common_attn_metadata=common_attn_metadata,
            **inputs,
        )

    def patched_update(self, positions, metadata, batch, *others):
        if self.first_positions is None:
            self.first_positions = positions[:batch].clone()
        advanced = update(self, positions, metadata, batch, *others).clone()
        self.positions[:batch] = torch.where(self.frozen, self.first_positions, advanced)
        return advanced

    proposer.propose, proposer._update_positions_dependent_metadata = patched_propose, patched_update


OUTSIDE: dict[str, Injection] = {
    "attention scaled by an eighth": scaled(f"{ATTENTION}.q_proj.weight", 1 / 8),
    "attention scaled by 1.1": scaled(f"{ATTENTION}.q_proj.weight", 1.1),
    "weights in int4 by groups of 32": Injection(tensors=int4_weights),
    "features of the middle boundary doubled": Injection(tensors=middle_block_doubled),
    "gate and up projections swapped": Injection(tensors=gate_and_up_swapped),
    "drafts after step 1 nonsense": Injection(patch=cliff_after_step_1),
    "token 0 embedded instead of the bonus token": Injection(patch=token_0_for_the_bonus_token),
    "hidden state halved before step 1": Injection(patch=halved_hidden_state),
    "heads of the attention's output rolled by one": Injection(tensors=output_heads_rolled),
    "first key-value head zeroed": Injection(tensors=first_value_head_zeroed),
    "head rows shifted by one": Injection(tensors=lambda t, _: {"lm_head.weight": t["lm_head.weight"].roll(1, 0)}),
    "noise of 20 percent on fc": Injection(tensors=noisy_fc),
    "every fourth slot missing in the drafter's cache": Injection(patch=every_fourth_slot_unwritten),
    "features of another request": Injection(patch=features_of_another_request),
    "neighbours turned instead of halves": Injection(tensors=interleaved_rotary),
    "post-attention norm of ones": Injection(tensors=unit_post_attention_norm),
}
OUTSIDE_LIVE = {"features two slots late": late_features(2)}
PARTIAL: dict[str, Callable[[Engine, Where], None]] = {
    "boundaries +1": later_boundaries,
    "low boundary dropped": low_boundary_dropped,
    "first two boundaries swapped": first_two_swapped,
    "token shift": unshifted_tokens,
    "cliff after step 0": cliff,
    "positions not advanced": frozen_positions,
    "features one slot late": late_features(1),
}
OUTSIDE_PAIRS = (OWN_TEXT, FINETUNED_PYTHON, BASE_PYTHON)
PARTIAL_PAIRS = (OWN_TEXT, FINETUNED_PYTHON)


def outside_runs(pair: Pair) -> list[Run]:
    whole = [Run(name, name, injection) for name, injection in OUTSIDE.items()]
    live = [Run(name, name, live=_in(apply, EVERYWHERE)) for name, apply in OUTSIDE_LIVE.items()]
    return [*whole, *live] if pair in OUTSIDE_PAIRS else []


def partial_runs(pair: Pair) -> list[Run]:
    return [
        Run(f"{fault}, {where}", fault, live=_in(apply, holds), where=where, every=EVERY[where], max_tokens=LONG)
        for fault, apply in (PARTIAL.items() if pair in PARTIAL_PAIRS else ())
        for where, holds in WHERE.items()
    ]


def _in(apply: Callable[[Engine, Where], None], where: Where) -> Callable[[Engine], None]:
    return lambda engine: apply(engine, where)


def runs_of(pair: Pair) -> list[Run]:
    return [*outside_runs(pair), *partial_runs(pair)]


# ------------------------------------------------------------------------------------------------------------- judging


LEAST_TO_NAME = 12  # departing rounds: a sign test over fewer names none of 36 hypotheses at 1 %
HEALTHY_KINDS = (diagnose.HEALTHY, diagnose.WEAK)
OVER = 0.01  # share of departing rounds above which "healthy" is wrong


def judge(pair: Pair, run: Run) -> dict:
    """One row: the verdict of stage 09 on a record, and whether it is right."""
    path = run.file(pair)
    record, verdict = json.loads(path.read_text()), verdicts.verdict_of(path)
    row = {
        "fault": record["fault"],
        "pair": record["pair"],
        "where": record["where"],
        "rounds": verdict.evidence["rounds_compared"],
        "departing": verdict.evidence["departing"],
        "accepted": verdict.evidence["engine"]["mean_length"]["value"] - 1,
        "verdict": verdict.kind,
        "named": verdict.fault,
        "ties": verdict.ties,
        "slice": _slice(verdict),
        "most_like": (verdict.evidence.get("most_like") or {}).get("name"),
        "sentence": verdict.sentence,
    }
    return row | {"right": _right(row, record, verdict)}


def _slice(verdict: diagnose.Verdict) -> dict | None:
    return verdict.where and {key: verdict.where[key] for key in ("by", "since", "until", "requests")}


def _right(row: dict, record: dict, verdict: diagnose.Verdict) -> bool:
    """No wrong name, nothing healthy that is not, and what holds in some places named with its place."""
    if row["fault"] == "none":
        return verdict.kind in HEALTHY_KINDS
    if verdict.kind in HEALTHY_KINDS:
        return row["departing"] <= OVER * row["rounds"]
    if row["where"] == "everywhere":
        dead = row["named"] == diagnose.NOTHING_AT_ALL and row["accepted"] < diagnose.HARDLY_ANY
        return row["named"] is None or dead
    if row["named"] is None:
        return row["departing"] < LEAST_TO_NAME
    return row["fault"] == row["named"] and _in_its_place(record, verdict)


def _in_its_place(record: dict, verdict: diagnose.Verdict) -> bool:
    """Whether a fault in some places is told with them: from token 60, a few tokens later at most; or its requests."""
    where = verdict.where
    if where is None:
        return False
    if record["where"] == HALF:
        known = {str(index) for index in record["ids"]}
        names = [request["id"] for request in record["requests"]]
        return {names[index] for index in where["requests"] or ()} <= known
    return where["by"] == "place" and SINCE <= where["since"] <= SINCE + engine_runs.POSITIONS


def write_results() -> None:
    runs = [(pair, run) for pair in OUTSIDE_PAIRS for run in (HEALTHY, LONG_HEALTHY, *runs_of(pair))]
    rows = [judge(pair, run) for pair, run in runs if run.file(pair).is_file()]
    faulty = [row for row in rows if row["fault"] != "none"]
    whole = [row for row in faulty if row["where"] == "everywhere"]
    partial = [row for row in faulty if row["where"] != "everywhere" and row["departing"] >= LEAST_TO_NAME]
    result = {
        "command": "python benchmarks/outside_catalogue.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "positions": engine_runs.POSITIONS,
        "rows": rows,
        "faults": len({row["fault"] for row in whole}),
        "wrong_names": sum(row["named"] is not None and not row["right"] for row in faulty),
        "called_healthy": sum(row["verdict"] in HEALTHY_KINDS and not row["right"] for row in faulty),
        "partial": {"runs": len(partial), "named_with_its_place": sum(row["right"] for row in partial)},
        "healthy_false_alarms": sum(not row["right"] for row in rows if row["fault"] == "none"),
    }
    write_json(project_path("benchmarks/results/outside_catalogue.json"), result)
    for row in rows:
        print(json.dumps({key: row[key] for key in row if key != "sentence"}))
    print({key: value for key, value in result.items() if key != "rows"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record what is missing, judge nothing")
    parser.add_argument("--judge", action="store_true", help="judge the records that exist, start no engine")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return engine_runs.serve(PAIRS[options.serve], runs_of(PAIRS[options.serve]))
    if not options.judge:
        for pair in OUTSIDE_PAIRS:
            engine_runs.process(__file__, pair.name)
    if not options.record:
        write_results()


if __name__ == "__main__":
    main()
