"""The audit's verdicts on the cases that public threads are about, by engine version and runner."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint_formats import BASE, MLA, TARGET, drafter_of, stored

from eagle3_lib.compat import audit, chat_template, export, gates, rules
from eagle3_lib.drafter import checkpoint
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.stages.audit import require_servable
from eagle3_lib.targets.known_configs import known_config

IDS = checkpoint.IDS
KIMI = known_config("Kimi-K2.5")
KIMI_DRAFTER = BASE.with_(
    hidden_size=7168, target_hidden_size=7168, vocab_size=163840, draft_vocab_size=32000, boundaries=(2, 30, 58)
)


def folder_of(tmp_path, config, tensors, **changes):
    """A drafter folder with exactly these config fields; ``None`` removes one."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    raw = {name: value for name, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def small(tmp_path, config=BASE, first="midlayer.", without=(), **changes):
    tensors = {k: v for k, v in stored(drafter_of(config), first).items() if k not in without}
    return folder_of(tmp_path, checkpoint.to_config_json(config, torch.float32), tensors, **changes)


def kimi(tmp_path, **changes):
    """A Kimi drafter as SpecForge writes it; the audit reads the names of tensors, so each holds one number."""
    with torch.device("meta"):
        names = stored_names(KIMI_DRAFTER)
    config = checkpoint.to_config_json(KIMI_DRAFTER, torch.bfloat16)
    return folder_of(tmp_path, config, {n: torch.zeros(1) for n in names if n != "d2t"} | {"d2t": d2t()}, **changes)


def stored_names(config):
    return ["midlayer." + n.removeprefix("layers.0.") if "layers" in n else n for n in audit.expected_tensors(config)]


def d2t():
    return torch.arange(32000) * 4


def verdicts(folder, engine, version, target=TARGET, **more):
    return {f.rule: f.severity for f in audit.check(folder, target, engine, version, **more)}


def boundaries(folder, engine, version, runner="", target=KIMI):
    finding = next(f for f in audit.check(folder, target, engine, version, runner=runner) if f.rule == "boundaries")
    raw = checkpoint.read_config(folder)
    return list(
        rules.captured(raw, engine, version, rules.Target.from_config(target), runner).boundaries
    ), finding.severity


@pytest.mark.parametrize(
    "engine, version, runner, captured, severity",
    [
        ("vllm", "0.16.0", "", [2, 30, 58], "ok"),  # the nested ids are not read; the default happens to be right
        ("vllm", "0.23.0", "v1", [1, 29, 57], "wrong"),
        ("vllm", "0.23.0", "v2", [2, 30, 58], "ok"),
        ("vllm", "0.26.0", "v1", [1, 29, 57], "wrong"),
        ("vllm", "0.26.0", "v2", [2, 30, 58], "ok"),
        ("vllm", "0.33.0", "v1", [1, 29, 57], "wrong"),
        ("vllm", "0.33.0", "", [2, 30, 58], "ok"),  # V2 by default
        ("sglang", "0.5.8", "", [2, 30, 58], "ok"),
        ("sglang", "0.5.16", "", [2, 30, 58], "ok"),
        ("sglang", "0.5.23", "", [2, 30, 58], "ok"),
    ],
)
def test_output_ids_inside_eagle_config_on_kimi(engine, version, runner, captured, severity, tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    folder = kimi(tmp_path, **{IDS: None})
    assert boundaries(folder, engine, version, runner) == (captured, severity)


def test_the_shim_is_right_in_every_vllm(tmp_path):
    out = export.shim(kimi(tmp_path, **{IDS: None}), tmp_path / "shim", KIMI)
    for version in rules.rules()["versions"]["vllm"]:
        for runner in rules.runners("vllm", version):
            assert boundaries(out, "vllm", version, runner) == ([2, 30, 58], "ok")


def test_default_runner_by_version_and_target(monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(rules, "is_installed", lambda *_: False)
    llama, moe = rules.Target.from_config(TARGET), rules.Target.from_config(KIMI)
    versions = ("0.16.0", "0.23.0", "0.26.0", "0.33.0")
    assert [rules.default_runner("vllm", v, llama) for v in versions] == ["v1", "v2", "v2", "v2"]
    assert [rules.default_runner("vllm", v, moe) for v in versions] == ["v1", "v1", "v1", "v2"]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert rules.default_runner("vllm", "0.33.0", llama) == "v1"


def test_a_speculators_default_drafter_on_each(tmp_path):
    config = BASE.with_(norm_before_residual=True, norm_before_fc=True, norm_output=True)
    tensors = stored(drafter_of(config))
    folder = folder_of(tmp_path, export.speculators_json(config, TARGET, torch.float32), tensors)
    found = {v: verdicts(folder, "vllm", v) for v in ("0.16.0", "0.23.0", "0.26.0", "0.32.0", "0.33.0")}
    assert found["0.16.0"]["norm_before_fc_unknown"] == "fails"
    assert found["0.23.0"] == {"speculators_flags_dropped": "wrong", "boundaries": "ok"}
    assert [found[v] for v in ("0.26.0", "0.32.0", "0.33.0")] == [{"boundaries": "ok"}] * 3
    for version in ("0.5.8", "0.5.16", "0.5.23"):
        found = verdicts(folder, "sglang", version)
        assert found["speculators_unknown"] == "fails" and found["norm_before_residual_not_read"] == "wrong"
        assert ("norm_before_fc_skipped" in found) == (version != "0.5.23")


FAULTS = {
    # name: (config, how the folder differs, engine, version, rule, severity)
    "flat names": (BASE, {"first": "layers.0."}, "sglang", "0.5.8", "flat_names_not_loaded", "wrong"),
    "flat names later": (BASE, {"first": "layers.0."}, "sglang", "0.5.16", "flat_names_not_loaded", None),
    "no head, vLLM": (BASE, {"without": ["lm_head.weight"]}, "vllm", "0.33.0", "lm_head_missing", "wrong"),
    "no head, SGLang": (BASE, {"without": ["lm_head.weight"]}, "sglang", "0.5.23", "lm_head_missing", "wrong"),
    "no d2t, vLLM": (BASE, {"without": ["d2t"]}, "vllm", "0.16.0", "d2t_missing", "wrong"),
    "no d2t, SGLang": (BASE, {"without": ["d2t"]}, "sglang", "0.5.8", "d2t_missing", "wrong"),
    "MTP type": (MLA, {"model_type": "deepseek_v3"}, "vllm", "0.33.0", "multi_token_prediction_rewrite", "fails"),
    "MTP type, SGLang": (
        MLA,
        {"model_type": "deepseek_v3"},
        "sglang",
        "0.5.23",
        "multi_token_prediction_rewrite",
        None,
    ),
    "MLA in 0.16": (MLA, {}, "vllm", "0.16.0", "mla_unknown", "fails"),
    "bias": (BASE.with_(attention_bias=True), {}, "sglang", "0.5.23", "attention_bias_dropped", "wrong"),
    "nested norm_output": (
        BASE,
        {"norm_output": None, "eagle_config": {"norm_output": True}},
        "vllm",
        "0.33.0",
        "norm_output_nested_not_read",
        "wrong",
    ),
    "count": (
        BASE.with_(boundaries=(6,)),
        {"eagle_config": None, "num_aux_hidden_states": None},
        "vllm",
        "0.33.0",
        "boundary_count_not_found",
        "fails",
    ),
    "d2t for all": (BASE.with_(draft_vocab_size=60), {}, "vllm", "0.32.0", "d2t_without_parameter", None),
    "two layers": (BASE.with_(num_hidden_layers=2), {}, "sglang", "0.5.8", "several_layers", "fails"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name, tmp_path):
    config, differs, engine, version, rule, severity = FAULTS[name]
    assert verdicts(small(tmp_path, config, **differs), engine, version).get(rule) == severity


@pytest.mark.parametrize(
    "engine, version, severity",
    [
        ("vllm", "0.16.0", "wrong"),
        ("vllm", "0.26.0", "wrong"),
        ("vllm", "0.32.0", "note"),
        ("sglang", "0.5.16", "fails"),
    ],
)
def test_drafter_positions_below_the_served_context(engine, version, severity, tmp_path):
    folder = small(tmp_path)
    found = [
        f for f in audit.check(folder, TARGET, engine, version, served=4096) if f.rule.startswith("draft_positions")
    ]
    assert [f.severity for f in found] == [severity] and "2048" in found[0].what and "4096" in found[0].what
    assert not any(
        f.rule.startswith("draft_positions") for f in audit.check(folder, TARGET, engine, version, served=2048)
    )


def test_a_version_between_two_read_ones_is_undecided_only_where_they_differ(tmp_path):
    folder = small(
        tmp_path, BASE.with_(norm_output=True, attention_bias=True), without=["midlayer.self_attn.o_proj.bias"]
    )
    found = {f.rule: f.what for f in audit.check(folder, TARGET, "vllm", "0.19.1")}
    assert "changed between 0.16.0 and 0.23.0; 0.19.1 was not read" in found["norm_output_not_read"]
    assert "was not read" not in found["output_bias_uninitialised"]


def test_an_embedding_that_is_a_copy_is_no_fault(tmp_path):
    drafter = drafter_of(BASE.with_(own_embedding=True))
    folder = checkpoint.save(drafter, tmp_path / "drafter", torch.float32)
    target = tmp_path / "target"
    target.mkdir()
    for weight, severity in ((drafter.embed_tokens.weight, None), (drafter.embed_tokens.weight + 1, "wrong")):
        save_file({"model.embed_tokens.weight": weight.detach().contiguous()}, target / "model.safetensors")
        assert verdicts(folder, "sglang", "0.5.23", target_folder=target).get("embedding_replaced") == severity


def test_every_rule_has_a_trait_and_a_source(tmp_path):
    survey = checkpoint.survey(small(tmp_path))
    known = set(audit.all_traits(survey, BASE, served=0)) | {"last_boundary"}
    for rule in rules.rules()["rules"]:
        assert rule["when"] in known, rule["when"]
        assert rule["severity"] in ("note", "ignored", "wrong", "fails") and rule["source"] and rule["remedy"]
        versions = rules.rules()["versions"][rule["engine"]]
        assert rule["since"] in versions and rule.get("until", versions[0]) in versions


def test_gates_of_the_installed_vllm():
    """Read in the source tree, not imported."""
    before = set(sys.modules)
    tree = gates.source_tree("vllm")
    if tree is None:
        pytest.skip("vLLM is not installed")
    assert {f.rule for f in gates.check(tree, TARGET, "vllm")} == {"gates"}
    assert [f.rule for f in gates.check(tree, TARGET | {"architectures": ["NoSuchModel"]}, "vllm")] == [
        "gate_architecture"
    ]
    assert {f.rule for f in gates.check(tree, KIMI, "vllm", latent_drafter=True)} == {"gates"}
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] == "vllm"}


OLD_TREE = {
    "config/speculative.py": ["def verify(self):", '    eagle3_target_supported = ["llama", "qwen"]'],
    "model_executor/models/registry.py": [
        "_TEXT_GENERATION_MODELS = {",
        '    "DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),',
        '    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),',
        "}",
        '_MULTIMODAL_MODELS = {"KimiK25ForConditionalGeneration": ("kimi_k25", "KimiK25ForConditionalGeneration")}',
    ],
    "model_executor/models/kimi_k25.py": ["class KimiK25ForConditionalGeneration(SupportsPP):", "    pass"],
    "model_executor/models/deepseek_v2.py": [
        "class DeepseekV2ForCausalLM(SupportsPP):",
        "    pass",
        "class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):",
        "    pass",
    ],
    "model_executor/models/llama.py": ["class LlamaForCausalLM(SupportsEagle3):", "    pass"],
    "v1/spec_decode/eagle.py": [
        "def load_model(self):",
        '    if name in ["Qwen3VLForConditionalGeneration"]:',
        "        pass",
        "    else:",
        "        self.model.config.image_token_index = target_model.config.image_token_index",
        "def propose(self):",
        "    assert isinstance(self.model, Eagle3LlamaForCausalLM)",
    ],
}


def test_gates_name_each_place_of_an_older_tree(tmp_path):
    """A tree written as vLLM 0.16 has it: a whitelist, no interface, an image token for other models."""
    tree = tmp_path / "vllm"
    for path, lines in OLD_TREE.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text("\n".join(lines))
    assert [f.rule for f in gates.check(tree, KIMI, "vllm 0.16.0")] == [
        "gate_whitelist",
        "gate_interface",
        "gate_image_token",
    ]
    found = gates.check(tree, KIMI, "vllm 0.16.0", latent_drafter=True)
    assert found[-1].rule == "gate_drafter_class" and found[-1].source == "vllm 0.16.0: v1/spec_decode/eagle.py:7"
    assert [f.severity for f in gates.check(tree, TARGET, "vllm 0.16.0")] == ["ok"]
    with pytest.raises(Eagle3Error, match="expected the package folder"):
        gates.check(tmp_path, TARGET, "vllm")


class Tokenizer(SimpleNamespace):
    def apply_chat_template(self, messages, **_):
        return {"input_ids": self.ids}


def test_template_parity_names_the_first_position_that_differs():
    conversation = [[{"role": "user", "content": "hello"}]]
    assert chat_template.template_parity(Tokenizer(ids=[1, 2, 3]), conversation, [[1, 2, 3]])[0].severity == "ok"
    found = chat_template.template_parity(Tokenizer(ids=[1, 2, 3]), conversation, [[1, 2, 4, 5]])[0]
    assert (found.severity, "from position 2 on: [3] here, [4, 5] served" in found.what) == ("wrong", True)


def test_what_only_the_strict_loader_sees(tmp_path):
    folder, target = small(tmp_path), rules.Target.from_config(TARGET)
    assert audit.strict(folder, target, []) == []
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"norm.weight": torch.full((32,), float("nan"))}, folder / "model.safetensors")
    known = audit.check(folder, TARGET, "vllm", "0.33.0")
    assert [f.severity for f in known] == ["ok"]
    found = audit.strict(folder, target, known)
    assert (found[0].severity, "norm.weight: found NaN" in found[0].what) == ("wrong", True)


def test_require_servable_tells_every_fault(tmp_path):
    findings = [
        vars(f) for f in audit.check(small(tmp_path, without=["d2t", "lm_head.weight"]), TARGET, "vllm", "0.33.0")
    ]
    report = {"drafter": "d", "engine": "vllm", "version": "0.33.0", "findings": findings}
    with pytest.raises(
        Eagle3Error, match="(?s)wrong: without d2t.*wrong: without lm_head|wrong: without lm_head.*wrong: without d2t"
    ):
        require_servable(report)
