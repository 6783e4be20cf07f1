"""Engine and GPU: every miss is told with the command that mends it, and a healthy machine has none."""

import copy
import json
import struct

import pytest

from eagle3_lib.compat import fit, memory_plan
from eagle3_lib.engines import options
from eagle3_lib.engines.base import PLAIN, Speculation
from eagle3_lib.engines.inside import fit_probe
from eagle3_lib.params import BenchmarkParams

H200 = {"name": "NVIDIA H200", "memory_gib": 139.8, "free_gib": 139.2, "compute_capability": "9.0"}
HEALTHY = {  # versions and architectures as the engines' wheels have them; library names of sgl-kernel 0.3.x
    "gpus": [H200 | {"driver": "580.65.06", "cuda": "13.0"}],
    "torch": {
        "version": "2.11.0+cu130",
        "cuda": "13.0",
        "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
    },
    "kernels": [
        {
            "package": "sgl-kernel",
            "version": "0.3.21",
            "files": {
                "sgl_kernel/sm90/common_ops.abi3.so": {"sm": ["8.0", "8.9", "9.0"], "ptx": []},
                "sgl_kernel/sm100/common_ops.abi3.so": {"sm": ["8.0", "8.9", "9.0", "10.0"], "ptx": []},
            },
        },
        {
            "package": "vllm",
            "version": "0.23.0",
            "files": {
                "vllm/_C.abi3.so": {"sm": ["7.5", "8.0", "9.0", "10.0"], "ptx": ["12.0"]},
                "vllm/_flashmla_C.abi3.so": {"sm": ["9.0", "10.0"], "ptx": []},
            },
        },
    ],
}


def changed(**paths):
    facts = copy.deepcopy(HEALTHY)
    for path, value in paths.items():
        *way, last = path.split("__")
        place = facts
        for step in way:
            place = place[int(step) if step.isdigit() else step]
        place[last] = value
    return facts


def test_a_fitting_machine_has_no_finding():
    assert fit.code_findings(HEALTHY) == []


def test_a_gpu_that_the_kernels_have_no_code_for():
    findings = fit.code_findings(changed(gpus__0__compute_capability="12.0"))
    by_rule = {finding.rule: finding for finding in findings}
    sgl = by_rule["sgl-kernel has no code for this GPU"]
    assert sgl.severity == "fails" and "TORCH_CUDA_ARCH_LIST=12.0 make build" in sgl.remedy
    assert "code for 8.0, 8.9, 9.0, 10.0, the GPU needs 12.0" in sgl.what
    some = by_rule["some of vllm has no code for this GPU"]  # _C has PTX for 12.0, FlashMLA nothing
    assert some.severity == "note" and "_flashmla_C" in some.what and "vllm/_C" not in some.what
    assert len(findings) == 2


def test_without_code_in_the_main_library_nothing_runs():
    files = {"vllm/_C.abi3.so": {"sm": ["10.0"], "ptx": []}, "vllm/_flashmla_C.abi3.so": {"sm": ["9.0"], "ptx": []}}
    (finding,) = fit.code_findings(changed(kernels__1__files=files))
    assert (
        finding.severity == "fails"
        and "TORCH_CUDA_ARCH_LIST=9.0" in finding.remedy
        and "vllm==0.23.0" in finding.remedy
    )


@pytest.mark.parametrize(
    ("change", "severity", "rule", "remedy"),
    [
        ({"torch": None}, "fails", "torch", "install the engine"),
        ({"torch__cuda": None}, "fails", "torch without CUDA", "pip install torch --index-url"),
        ({"gpus__0__cuda": "12.8"}, "fails", "driver older than CUDA", "https://download.pytorch.org/whl/cu128"),
        (
            {"torch__cuda": "13.2", "torch__version": "2.14.1+cu132"},
            "note",
            "driver older than CUDA",
            "a newer driver",
        ),
        ({"torch__architectures": ["sm_80", "sm_100a"]}, "fails", "torch has no code for this GPU", "pip install"),
    ],
)
def test_each_miss_has_its_remedy(change, severity, rule, remedy):
    findings = fit.code_findings(changed(**change))
    assert [(finding.severity, finding.rule) for finding in findings] == [(severity, rule)]
    assert remedy in findings[0].remedy and remedy in fit.told(findings)


def test_code_runs_within_a_major_version_and_ptx_on_later_ones():
    assert fit.runs_on("8.9", {"sm": ["8.0"], "ptx": []})
    assert not fit.runs_on("8.0", {"sm": ["8.9"], "ptx": []})
    assert not fit.runs_on("9.0", {"sm": ["8.0", "10.0"], "ptx": []})
    assert fit.runs_on("12.1", {"sm": [], "ptx": ["9.0"]}) and not fit.runs_on("8.0", {"sm": [], "ptx": ["9.0"]})


def test_memory(target_folder):
    params = BenchmarkParams(mode="base", drafter="drafters/smollm2-135m-eagle3", dtype="bfloat16", max_model_len=8192)
    needs = memory_plan.memory_needs(params, target_folder, Speculation("base", params.drafter))
    assert needs["weights_gib"] == pytest.approx(134_515_008 * 2 / 2**30, abs=1e-3)
    assert needs["kv_gib"] == pytest.approx(30 * 2 * 3 * 64 * 2 * 8192 / 2**30, abs=1e-3)
    assert 0 < needs["drafter_gib"] < 0.1 and needs["gpus"] == 1
    assert memory_plan.memory_needs(params, target_folder, PLAIN)["drafter_gib"] == 0
    gpus = [H200]
    assert fit.memory_findings(needs, gpus, 0.9, "--gpu-memory-utilization") == []
    (taken,) = fit.memory_findings(needs, [H200 | {"free_gib": 70.0}], 0.9, "--gpu-memory-utilization")
    assert "[--gpu-memory-utilization, '0.50']" in taken.remedy and "125.8 GiB (90%), 70.0 are free" in taken.what
    (large,) = fit.memory_findings(needs | {"gpu_gib": 594.0}, gpus, 0.9, "--gpu-memory-utilization")
    assert large.rule == "does not fit the GPU" and "-tp 2" in large.remedy
    (few,) = fit.memory_findings(needs | {"gpus": 8}, gpus, 0.9, "--gpu-memory-utilization")
    assert few.rule == "too few GPUs"


def test_quantized_tensors_count_as_stored(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
        "b.weight_packed": {"dtype": "I32", "shape": [4, 1], "data_offsets": [128, 144]},
        "c.weight": {"dtype": "F8_E4M3", "shape": [10], "data_offsets": [144, 154]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(154))
    assert memory_plan.weight_bytes(tmp_path, "bfloat16") == 4 * 8 * 2 + 4 * 4 + 10


@pytest.mark.parametrize(
    "words", [["-tp", "8"], ["--tensor-parallel-size=8"], ["--tp", "8"], ["--eager", "--tp-size", "8"]]
)
def test_tensor_parallelism_in_arguments(words):
    assert options.tensor_parallel(words) == 8 and options.tensor_parallel(["--other"]) == 1


def image(kind, architecture, size):
    return struct.pack("<HHIQIIHHI", kind, 257, 64, size, 0, 0, 0, 0, architecture) + bytes(64 - 32 + size)


def test_architectures_are_read_from_fat_binaries(tmp_path):
    """Two fat binaries in a library, and their magic number by chance (format checked on libnvjpeg 12.4: 5.0 to 12.1)."""
    first, second = image(2, 80, 24) + image(2, 90, 8), image(2, 120, 16) + image(1, 120, 40)
    binaries = [struct.pack("<4sHHQ", fit_probe.MAGIC, 1, 16, len(part)) + part for part in (first, second)]
    library = tmp_path / "_C.abi3.so"
    library.write_bytes(
        b"\x7fELF" + bytes(60) + binaries[0] + bytes(7) + fit_probe.MAGIC + bytes(5) + binaries[1] + b"\x50\xed"
    )
    assert fit_probe.images(library) == {"sm": ["8.0", "9.0", "12.0"], "ptx": ["12.0"]}
    library.write_bytes(b"")
    assert fit_probe.images(library) == {"sm": [], "ptx": []}


@pytest.mark.slow
def test_the_probe_runs_below_another_interpreter(monkeypatch):
    monkeypatch.setattr(fit.manifest, "gpus", lambda: HEALTHY["gpus"])
    facts = fit.collect()
    assert facts["torch"]["cuda"] is None and facts["torch"]["version"].endswith("+cpu") and facts["kernels"] == []
    assert [finding.rule for finding in fit.code_findings(facts)] == ["torch without CUDA"]


def test_the_engine_itself(monkeypatch, target_folder):
    """This interpreter has the CPU build of vLLM, which needs no GPU, and no SGLang."""
    monkeypatch.setattr(fit.manifest, "gpus", lambda: HEALTHY["gpus"])
    assert fit.before_launch(BenchmarkParams(), target_folder, PLAIN) == []
    (missing,) = fit.before_launch(BenchmarkParams(engine="sglang"), target_folder, PLAIN)
    assert missing.severity == "fails" and "found no sglang" in missing.what and "engine_python" in missing.remedy


def test_without_a_gpu_nothing_is_asked(monkeypatch, target_folder):
    monkeypatch.setattr(fit.manifest, "gpus", lambda: [])
    assert fit.before_launch(BenchmarkParams(engine_python="/no/such"), target_folder, PLAIN) == []


@pytest.mark.parametrize(
    ("ranks", "engine", "told"),
    [
        (1, "vllm", []),
        (
            2,
            "vllm",
            ["target: 9 attention heads", "target: 3 KV heads", "drafter: 9 attention heads", "drafter: 3 KV heads"],
        ),
        (3, "vllm", ["drafter: 8192 tokens of its (draft) vocabulary"]),  # as vLLM 0.32 refused it
        (3, "sglang", []),
        (
            9,
            "vllm",
            ["target: 49152 tokens of its (draft) vocabulary", "drafter: 8192 tokens of its (draft) vocabulary"],
        ),
    ],
)
def test_what_ranks_cannot_divide(target_folder, ranks, engine, told):
    params = BenchmarkParams(engine=engine, engine_args=["-tp", str(ranks)])
    found = fit.division_findings(params, target_folder, Speculation("base", "drafters/smollm2-135m-eagle3"))
    assert [finding.what for finding in found] == [f"{words}, {ranks} ranks" for words in told]
    assert {finding.severity for finding in found} <= {"fails"}
