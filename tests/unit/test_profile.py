"""Profiles: own time of nested operators, kinds by name, GPU kernels before CPU operators."""

import pytest

from eagle3_lib import profile


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
    assert dict(profile.own_times(events)) == {
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
    assert profile.kind_of(name) == kind


def test_kernels_count_where_there_are_any():
    events = [event("aten::mm", 0, 500), event("nccl_AllReduce", 0, 30, "kernel"), event("gemm", 30, 70, "kernel")]
    result = profile.summarise(events)
    assert result["device"] == "gpu" and result["communication_share"] == 0.3
    assert result["share"]["dense matmul"] == 0.7 and sum(result["share"].values()) == pytest.approx(1)
    assert result["top"][0] == ["gemm", "dense matmul", 0.0001, 1]
