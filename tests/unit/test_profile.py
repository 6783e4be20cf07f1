"""Profiles: own time of nested operators, kinds by name, unions over streams, ranks, the drafter's part."""

import gzip
import json

import pytest

from eagle3_lib.engines import traces
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import ProfileParams
from eagle3_lib.reports import plots


def event(name, start, duration, cat="cpu_op", thread=1):
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "cat": cat, "pid": 1, "tid": thread}


def test_an_operators_own_time_leaves_out_what_it_calls():
    events = [
        event("aten::linear", 0, 100),
        event("aten::addmm", 10, 60),
        event("aten::copy_", 20, 15),
        event("aten::silu", 100, 30),
        event("aten::mm", 50, 40, thread=2),
    ]
    assert dict(traces.own_times(events)) == {
        "aten::linear": 40,
        "aten::addmm": 45,
        "aten::copy_": 15,
        "aten::silu": 30,
        "aten::mm": 40,
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>", "communication"),
        ("c10d::allreduce_", "communication"),
        ("_C::shm_allreduce", "communication"),
        ("multimem_all_reduce_kernel", "communication"),
        ("flash_fwd_splitkv_kernel", "attention"),
        ("_C::cpu_attention_with_kv_cache", "attention"),
        ("fused_moe_kernel", "mixture of experts"),
        ("aten::addmm", "dense matmul"),
        ("nvjet_tst_128x64_64x8", "dense matmul"),
        ("_C::rms_norm", "normalisation and rope"),
        ("aten::argmax", "sampling"),
        ("aten::copy_", "elementwise and copies"),
        ("something_new", "other"),
    ],
)
def test_kinds_of_operations(name, kind):
    assert traces.kind_of(name) == kind


def test_kernels_count_where_there_are_any():
    events = [event("aten::mm", 0, 500), event("nccl_AllReduce", 0, 30, "kernel"), event("gemm", 30, 70, "kernel")]
    result = traces.summarise([traces.Trace(0, events)])
    assert result["device"] == "gpu" and result["communication_share"] == 0.3
    assert result["share"]["dense matmul"] == 0.7 and sum(result["share"].values()) == pytest.approx(1)
    assert result["top"][0] == ["gemm", "dense matmul", 0.0001, 1]


def gpu_trace(stretch):
    """One rank of a GPU: prefill, then a step on two streams that overlap, a drafter's range with its own communication."""
    return [
        event("execute_context_1(40)_generation_0(0)", 0, 100, "gpu_user_annotation"),
        event("nvjet_tst_128x64", 0, 100, "kernel"),
        event("execute_context_0(0)_generation_1(1)", 100, 300, "gpu_user_annotation"),
        event("nvjet_tst_128x64", 100, 50, "kernel", thread=7),
        event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 140, 40 * stretch, "kernel", thread=13),  # 10 of it hidden
        event("fused_moe_kernel", 250, 50, "kernel", thread=7),
        event("gpu_model_runner: draft", 300, 100, "gpu_user_annotation"),
        event("nvjet_tst_64x8", 300, 20, "kernel", thread=7),
        event("flash_fwd_splitkv_kernel", 310, 20, "kernel", thread=9),
        event("cross_device_reduce_1stage", 340, 10, "kernel", thread=7),
        event("aten::mm", 0, 5000),
    ]


def test_streams_are_united_and_ranks_kept_apart(tmp_path):
    for rank, stretch in ((1, 2), (0, 1)):
        content = {"traceEvents": gpu_trace(stretch), "distributedInfo": {"rank": rank}}
        with gzip.open(tmp_path / f"host-{rank}.pt.trace.json.gz", "wt") as file:
            json.dump(content, file)
    (tmp_path / "api_server.pt.trace.json").write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "x"}]}))
    found = traces.read(tmp_path)
    assert [trace.rank for trace in found] == [0, 1]
    result = traces.summarise(found)
    first, second = result["ranks"]
    # Rank 0 from 100 to 350 us: 100-180, 250-300, 300-330, 340-350 are busy: 170 of 250.
    assert result["device"] == "gpu" and first["idle_share"] == pytest.approx(1 - 170 / 250)
    assert first["communication_share"] == pytest.approx(50 / 170, abs=1e-4)
    assert first["communication_hidden"] == pytest.approx(10 / 50)
    expected = {"dense matmul": 50, "mixture of experts": 50, "drafter": 30, "attention": 0, "communication": 50}
    assert {kind: first["share"][kind] for kind in expected} == pytest.approx(
        {kind: time / 170 for kind, time in expected.items()}, abs=1e-4
    )
    assert second["communication_share"] == pytest.approx(90 / 210, abs=1e-4)
    assert result["communication_share"] == pytest.approx((50 / 170 + 90 / 210) / 2, abs=1e-4)
    assert ["nvjet_tst_64x8", "drafter", 0.0, 1] in result["top"]
    assert "communication" in [
        label.get_text() for label in plots.profile(result | {"tokens": 1}).axes[0].get_yticklabels()
    ]


def test_steps_count_that_decode_the_whole_batch():
    steps = [(1, 0), (1, 1), (0, 2), (0, 2), (0, 1), (0, 0)]  # requests that prefill and that decode
    events = []
    for place, (prefilling, decoding) in enumerate(steps):
        name = f"execute_context_{prefilling}({40 * prefilling})_generation_{decoding}({5 * decoding})"
        events += [
            event(name, 100 * place, 50, "user_annotation"),
            event("aten::mm", 100 * place + 10, 30),
            event("aten::argmax", 100 * place + 60, 10),  # sampling, after the marked part of the step
        ]
    both, one = (traces.summarise([traces.Trace(0, events)], batch) for batch in (2, 1))
    assert (both["busy_s"], one["busy_s"]) == (0.0001, 0.0)  # 80 and 40 us
    assert both["share"]["dense matmul"] == one["share"]["dense matmul"] == 0.75
    assert both["top"] == [["aten::mm", "dense matmul", 0.0001, 2], ["aten::argmax", "sampling", 0.0, 2]]
    with pytest.raises(Eagle3Error, match="no operator in steps that decode 3 requests"):
        traces.summarise([traces.Trace(0, events)], 3)


def test_setups_are_servers_of_their_own():
    assert list(ProfileParams().servers()) == ["vllm"] and ProfileParams().servers()["vllm"].eager
    setups = {"tp2": {"engine_args": ["-tp", "2"]}, "tp2_graphs": {"engine_args": ["-tp", "2"], "eager": False}}
    servers = ProfileParams(run="mine", batches=[1, 8], dtype="bfloat16", setups=setups).servers()
    assert [(s.engine_args, s.eager) for s in servers.values()] == [(["-tp", "2"], True), (["-tp", "2"], False)]
    assert {(s.dtype, s.out) for s in servers.values()} == {("bfloat16", "runs/mine/profile")}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"setups": {"tp2": {"engine_arg": []}}}, "setups: tp2.engine_arg: Extra inputs"),
        ({"setups": {"tp2": {"eager": "no"}}}, "setups: tp2.eager: Input should be a valid boolean"),
        ({"setups": {"tp2": {"out": "runs/x"}}}, "setups: tp2.out: the same in all setups"),
        ({"setups": {"two GPUs": {}}}, "setups: found the name 'two GPUs'"),
        ({"batches": [1, 8, 8]}, "batches: found [1, 8, 8], expected: different numbers of requests"),
    ],
)
def test_setups_and_batches_that_are_none(values, told):
    with pytest.raises(Eagle3Error) as error:
        ProfileParams.check(values, "params/mine.yaml: profile")
    assert told in str(error.value)


def test_the_figure_has_a_line_for_each_setup():
    decodes = [
        {"setup": setup, "batch": batch, "communication_share": share}
        for setup, shares in {"tp1": (0, 0), "tp2": (0.5, 0.25)}.items()
        for batch, share in zip((1, 64), shares, strict=True)
    ]
    axes = plots.communication(decodes).axes[0]
    assert [(line.get_label(), list(line.get_ydata())) for line in axes.lines] == [("tp1", [0, 0]), ("tp2", [50, 25])]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "64"]


def test_an_operator_that_calls_others_counts_once():
    events = [event("_C::attention", 0, 100), event("aten::copy_", 10, 10), event("aten::copy_", 50, 10)]
    result = traces.summarise([traces.Trace(0, events)])
    assert result["device"] == "cpu" and result["share"]["attention"] == 0.8
    assert result["top"][0] == ["_C::attention", "attention", 0.0001, 1]
    assert result["communication_hidden"] is None and result["idle_share"] == 0


def test_a_trace_without_decode_steps_is_refused(tmp_path):
    prefill = gpu_trace(1)[:2]
    with pytest.raises(Eagle3Error, match="no operator in steps that decode 1 requests and prefill none"):
        traces.summarise([traces.Trace(0, prefill)])
    with pytest.raises(Eagle3Error, match="found no trace with operators"):
        traces.read(tmp_path)
