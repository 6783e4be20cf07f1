"""The plan of a run before anything of it is here: sizes against sums made by hand, and what is told of failures."""

import pytest

from eagle3_lib.compat import memory_plan, plan
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import Run
from eagle3_lib.targets.known_configs import known_config

KIMI = known_config("Kimi-K2.5")
MATRIX = 7168 * 2048  # of one expert: gate, up and down each have as many


@pytest.fixture(scope="module")
def kimi():
    return plan.compute(Run("params/kimi_k25.yaml"))


@pytest.fixture(scope="module")
def kimi_text(kimi):
    return plan.text(kimi)


def test_target_weights_of_kimi_k25():
    experts = 60 * 384 * 3 * MATRIX  # 4 bits, and a bfloat16 scale for each 32
    attention = 61 * (7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168)
    others = 60 * (3 * MATRIX + 384 * 7168) + 3 * 7168 * 18432 + 2 * 163840 * 7168  # shared, router, dense layer, ends
    found = memory_plan.target_weights(KIMI, 8, "bfloat16")
    assert found["parameters"] == pytest.approx(experts + attention + others, rel=1e-5)
    assert found["parameters"] == pytest.approx(1.026e12, rel=1e-3)
    assert found["bytes"] == pytest.approx(experts * 4.5 / 8 + 2 * (attention + others), rel=1e-4)
    assert found["bytes"] == pytest.approx(594e9, rel=1e-3)
    replicated = 2 * (61 * 7168 * (1536 + 576) + 60 * 384 * 7168)  # down-projections of latent attention, routers
    assert found["gpu_bytes"] == pytest.approx((found["bytes"] - replicated) / 8 + replicated, rel=1e-4)
    assert found["gpu_bytes"] == pytest.approx(76.2e9, rel=0.05)


def test_drafter_weights_of_the_stand_in():
    fc, attention, mlp = 3 * 7168 * 7168, 3 * 14336 * 8192 + 8192 * 7168, 3 * 7168 * 12288
    head, embedding = 32000 * 7168, 163840 * 7168
    config = memory_plan.drafter_config(known_config("Kimi-K25-eagle3"), "config.json", KIMI, own_embedding=True)
    found = memory_plan.drafter_weights(config, 8, "bfloat16")
    assert config.boundaries == (2, 30, 58)
    assert found["parameters"] == fc + attention + mlp + head + embedding + 4 * 7168
    assert found["bytes"] == pytest.approx(4.5e9, rel=0.01), "the source's checkpoint"
    assert found["gpu_bytes"] == pytest.approx(2 * (fc + (attention + mlp + head + embedding) / 8), rel=1e-3)
    shared = memory_plan.drafter_weights(config.with_(own_embedding=False), 8, "bfloat16")
    assert found["parameters"] - shared["parameters"] == embedding
    trained = fc + attention + mlp + head + 4 * 7168
    assert found["training_bytes"] == shared["training_bytes"] == 16 * trained + 4 * embedding


def test_kv_cache_of_latent_and_grouped_attention():
    text = KIMI["text_config"]
    assert memory_plan.kv_bytes_per_token(text, 8, "bfloat16") == 61 * (512 + 64) * 2 == 70_272
    assert memory_plan.kv_bytes_per_token(text, 1, "bfloat16") == 70_272, "each GPU holds the latent whole"
    drafter = known_config("Kimi-K25-eagle3")
    assert memory_plan.kv_bytes_per_token(drafter, 8, "bfloat16") == 2 * 8 * 128 * 2
    small = known_config("SmolLM2-135M-Instruct")
    assert memory_plan.kv_bytes_per_token(small, 1, "float32") == 30 * 2 * 3 * 64 * 4
    assert memory_plan.kv_bytes_per_token(small, 8, "float32") == 30 * 2 * 1 * 64 * 4, "a head a GPU at least"


def test_smollm2_has_its_known_size_and_a_tied_head():
    found = memory_plan.target_weights(known_config("SmolLM2-135M-Instruct"), 1, "float32")
    assert (found["parameters"], found["bytes"]) == (134_515_008, 4 * 134_515_008)


def test_quantization_of_another_kind_is_refused():
    with pytest.raises(Eagle3Error, match="found 'fp8' with 0 groups, expected 'compressed-tensors'"):
        memory_plan.quantized_bits({"quant_method": "fp8"})
    with pytest.raises(Eagle3Error, match="found 'NoSuchForCausalLM'"):
        memory_plan.target_weights({"architectures": ["NoSuchForCausalLM"]}, 1, "float32")


def test_disk_of_kimi_k25_and_how_far_the_source_is_from_it(kimi, kimi_text):
    disk = kimi["disk"]
    assert disk["stream_bytes"] == 4 * 7168 * 2 == 57_344
    assert disk["tokens"] == 17_300_000
    assert (
        disk["told"]["computed_gigabytes"]
        == pytest.approx(17_300_000 * 57_344 / 1e9)
        == pytest.approx(992.05, abs=0.01)
    )
    assert disk["told"]["share"] == pytest.approx(828 / 992.05 - 1, abs=1e-4) == pytest.approx(-0.165, abs=1e-3)
    assert disk["told"]["share_if_gib"] == pytest.approx(-0.104, abs=1e-3)
    assert disk["told"]["tokens_that_fit"] == pytest.approx(14.44e6, rel=1e-3)
    assert "828 GB; its tokens x bytes are 992 GB: -16.5 % (read as GiB -10.4 %)" in kimi_text


def test_memory_of_kimi_k25(kimi, kimi_text):
    memory = kimi["memory"]
    assert memory["gpus"] == 8
    assert memory["fixed_bytes"] == pytest.approx(77.0e9, rel=0.05)
    room = 0.9 * 141 * 2**30 - memory["fixed_bytes"]
    assert memory["kv_tokens"][141] == int(room / (70_272 + 4096))
    assert memory["kv_tokens"][80] < 16384, "one text of max_model_len does not fit beside the weights"
    assert "547 GB loaded: -7.9 % (read as GiB -1.2 %)" in kimi_text


def test_hours_follow_from_the_told_rates(kimi):
    hours = {what: h for what, (h, _) in kimi["hours"].items()}
    assert hours["generate"] == pytest.approx(5.3)
    assert hours["extract"] == pytest.approx(17.3e6 / 3165 / 3600) == pytest.approx(1.52, abs=0.01)
    assert hours["train"] == pytest.approx(2.6)
    assert hours["each start of the first engine"] == pytest.approx(25 / 60)


def test_half_the_samples_take_half_the_hours():
    run = Run("params/kimi_k25.yaml")
    run.raw = run.raw | {"preflight": {"samples": 5000, "tokens_per_sample": 1730}}
    hours = plan.hours(run, plan.expected(run))
    assert hours["generate"][0] == pytest.approx(2.65) and hours["train"][0] == pytest.approx(1.3)


def test_arguments_differ_by_engine_mode_and_version(kimi):
    rows = {(row["setup"], row["mode"], row["versions"][0]): row["words"] for row in kimi["arguments"]}
    old, new = rows["vllm_0.16", "public", "0.16.0"], rows["vllm_0.16", "public", "0.32.0"]
    assert new == [*old, "--per-request-spec-decode-metrics", "detailed"]
    assert old[old.index("--tensor-parallel-size") + 1] == "8"
    assert '"method": "eagle3", "model": "models/Kimi-K25-eagle3"' in old[-1]
    sglang = rows["sglang", "trained", "0.5.8"]
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "runs/kimi_k25/train/drafter"
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "5"


def test_audit_and_gates_by_version(kimi, kimi_text):
    public = {(r["version"], r["runner"]): (r["boundaries"], r["worst"]) for r in kimi["audits"]["public"]}
    assert public["0.16.0", "v1"] == ([2, 30, 58], "ok")
    assert public["0.23.0", "v1"] == ([1, 29, 57], "wrong")
    assert public["0.5.16", ""] == ([2, 30, 58], "ok")
    assert {r["worst"] for r in kimi["audits"]["trained"]} == {"ok"}, "as stage 05 exports it"
    refused = {
        row["version"]: len(row["findings"]) for row in kimi["gates"] if row["findings"][0]["severity"] == "fails"
    }
    assert refused == {"0.16.0": 3, "0.5.8": 1}
    assert "so vLLM 0.16 needs three patches" in kimi_text


def test_equal_low_acceptances_are_read_as_the_engine(kimi, kimi_text):
    assert kimi["round"]["mean_acceptance_length"] == pytest.approx(1.6)
    assert kimi["round"]["plain_steps"] == pytest.approx(1.6 / 0.66)
    assert "2 drafters at one low rate (15%) mean the engine" in kimi_text


def test_every_told_figure_is_said(kimi, kimi_text):
    told = kimi_text[kimi_text.index("Figures to expect") :]
    for figure in (
        "0.515",
        "10,000",
        "5.3",
        "[2, 30, 58, 60]",
        "17,300,000",
        "3,165",
        "828",
        "2.6",
        "4.5",
        "0.15",
        "0.66",
    ):
        assert figure in told
    for figure in (
        "547 GB",
        "22 seconds",
        "1,500 seconds",
        "AQ-MedAI/Kimi-K25-eagle3",
        "vLLM 0.16",
        "SGLang",
        "0 errors",
    ):
        assert figure in told
    assert set(plan.FIGURES) == {(stage, name) for stage, figures in kimi["expect"].items() for name in figures}


def test_an_unknown_figure_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("drafters: {base: drafters/smollm2-135m-eagle3}\nexpect: {train: {hour: 2}}\n")
    with pytest.raises(Eagle3Error, match=r"unknown figure train\.hour; expected some of .*train\.hours"):
        plan.compute(Run(path))


def test_gpus_are_read_from_the_engines_arguments():
    assert plan.gpus_of({"engine_args": ["--tp", "4"]}, "x") == plan.gpus_of({"engine_args": ["--tp=4"]}, "x") == 4
    assert plan.gpus_of({}, "x") == 1
    with pytest.raises(Eagle3Error, match="mine.yaml: engine_args: expected a number of GPUs: .*'many'"):
        plan.gpus_of({"engine_args": ["-tp", "many"]}, "mine.yaml")


def test_the_quickstart_has_a_plan(target_folder):
    found = plan.compute(Run("params/quickstart.yaml"))
    assert found["disk"]["stream_bytes"] == 4 * 576 * 2
    assert found["memory"]["target"]["bytes"] == 4 * 134_515_008
    assert found["hours"] == {} and found["round"] is None
    assert {row["engine"] for rows in found["audits"].values() for row in rows} == {"vllm"}
    assert "no rates are told" in plan.text(found)


def test_a_model_that_nobody_knows_is_named():
    with pytest.raises(Eagle3Error, match="nobody-knows: found no config.json"):
        plan.config_of("org/nobody-knows")
