"""Profiles: own time of nested operators, kinds by name, unions over streams, ranks, the drafter's part."""

import gzip
import json

import pytest

from eagle3_lib import plots, traces
from eagle3_lib.errors import Eagle3Error


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


def test_an_operator_that_calls_others_counts_once():
    events = [event("_C::attention", 0, 100), event("aten::copy_", 10, 10), event("aten::copy_", 50, 10)]
    result = traces.summarise([traces.Trace(0, events)])
    assert result["device"] == "cpu" and result["share"]["attention"] == 0.8
    assert result["top"][0] == ["_C::attention", "attention", 0.0001, 1]
    assert result["communication_hidden"] is None and result["idle_share"] == 0


def test_a_trace_without_decode_steps_is_refused(tmp_path):
    prefill = gpu_trace(1)[:2]
    with pytest.raises(Eagle3Error, match="no operator outside prefill"):
        traces.summarise([traces.Trace(0, prefill)])
    with pytest.raises(Eagle3Error, match="found no trace with operators"):
        traces.read(tmp_path)
