"""The plugin that lifts vLLM 0.16's gates: off by itself, a no-op on a vLLM without gates, three lifts on a stock 0.16.

The 0.16 here is a package with that release's places and none of its layers; benchmarks/plugin_on_wheel.py runs the same
on the release's own classes.
"""

import os
import subprocess
import sys
import tomllib

import pytest

from eagle3_lib.compat import vllm_plugin
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.paths import ROOT

STUB = {
    "__init__.py": "__version__ = '0.16.0'\nfrom .model_executor.models.registry import ModelRegistry",
    "config/speculative.py": """
class SpeculativeConfig:
    def _verify_args(self):
        eagle3_target_supported = ["llama", "qwen", "minicpm", "gpt_oss"]
        if not any(name in self.model_type for name in eagle3_target_supported):
            raise ValueError(f"Got {self.model_type}")
        return self
""",
    "model_executor/models/registry.py": """
_TEXT_GENERATION_MODELS = {
    "DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
}
_MULTIMODAL_MODELS = {"KimiK25ForConditionalGeneration": ("kimi_k25", "KimiK25ForConditionalGeneration")}


class ModelRegistry:
    models = {}

    @classmethod
    def register_model(cls, architecture, name):
        assert architecture not in cls.models, "registered twice"
        cls.models[architecture] = name
""",
    "model_executor/models/interfaces.py": "class SupportsEagle3:\n    pass",
    "model_executor/models/deepseek_v2.py": """
import torch


class DeepseekV2Model(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers, self.start_layer, self.end_layer = torch.nn.ModuleList(layers), 0, len(layers)
        self.embed_tokens = torch.nn.Embedding(32, 8)

    def embed_input_ids(self, ids):
        return self.embed_tokens(ids)

    def norm(self, hidden, residual):
        return 10 * (hidden + residual), None

    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds=None):
        return "vLLM's own"


class DeepseekV2ForCausalLM(torch.nn.Module):
    model_cls = DeepseekV2Model

    def __init__(self, layers, config):
        super().__init__()
        self.model, self.config = self.model_cls(layers), config


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    pass
""",
    "model_executor/models/kimi_k25.py": """
class KimiK25ForConditionalGeneration:
    def __init__(self, vllm_config, prefix=""):
        self.config, self.language_model = vllm_config.config, vllm_config.text

    def get_language_model(self):
        return self.language_model
""",
    "sequence.py": "class IntermediateTensors:\n    pass",
    "v1/spec_decode/eagle.py": """
def load_model(self):
    self.model.config.image_token_index = target_model.config.image_token_index
""",
}
LAYERS = """
import torch
from types import SimpleNamespace
from eagle3_lib.compat import vllm_plugin


class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, positions, hidden, residual):
        residual = hidden.clone() if residual is None else residual.add_(hidden)  # in place, as vLLM's norm
        return torch.full_like(hidden, 10.0**self.number), residual


def deepseek(depth=7, **config):
    from eagle3_lib.engines.inside.vllm_capture import CapturingDeepseek

    target = CapturingDeepseek([Layer(number) for number in range(depth)], SimpleNamespace(**config))
    torch.nn.init.zeros_(target.model.embed_tokens.weight)
    return target.requires_grad_(False)
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    tree = tmp_path_factory.mktemp("stub") / "vllm"
    for path, text in STUB.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    return tree.parent


def run(program, path=None, switch="1"):
    """A program in a process of its own, with a vllm from ``path`` first: (exit code, output and log)."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*([path] if path else []), ROOT]))}
    environment |= {vllm_plugin.SWITCH: switch, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_it_is_off_unless_asked_for(monkeypatch):
    monkeypatch.setattr(vllm_plugin, "lift", lambda: pytest.fail("lifted"))
    for value in (None, "", "0"):
        if value is None:
            monkeypatch.delenv(vllm_plugin.SWITCH, raising=False)
        else:
            monkeypatch.setenv(vllm_plugin.SWITCH, value)
        vllm_plugin.register()
    monkeypatch.setenv(vllm_plugin.SWITCH, "yes")
    with pytest.raises(Eagle3Error, match="EAGLE3_LIFT_GATES: found 'yes', expected 1 or 0"):
        vllm_plugin.register()


@pytest.mark.slow
def test_the_installed_vllm_loads_it_needs_nothing_and_says_so(tmp_path):
    """Through vLLM's own loader, which finds the entry point of pyproject.toml in a package's metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (name, place), *others = project["entry-points"]["vllm.general_plugins"].items()
    assert (place, others) == ("eagle3_lib.compat.vllm_plugin:register", [])
    metadata = tmp_path / "probe-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {place}\n")
    code, said = run("from vllm.plugins import load_general_plugins; load_general_plugins()", tmp_path)
    assert code == 0, said
    assert "vLLM 0.32.0 runs EAGLE-3 on DeepSeek-V3 and Kimi targets by itself; nothing lifted" in said


@pytest.mark.slow
def test_the_three_gates_of_0_16(stub):
    code, said = run(
        LAYERS
        + """
from vllm import ModelRegistry
from vllm.config.speculative import SpeculativeConfig

bound = SpeculativeConfig._verify_args  # as pydantic holds it, from before
vllm_plugin.register(); vllm_plugin.register()
for name in ("kimi_k2", "deepseek_v3", "llama"):
    bound(SimpleNamespace(model_type=name))
try:
    bound(SimpleNamespace(model_type="gemma3"))
except ValueError as error:
    print(error)
print(sorted(ModelRegistry.models.items()))

from eagle3_lib.engines.inside.vllm_capture import CapturingKimiK25

kimi = CapturingKimiK25(SimpleNamespace(config=SimpleNamespace(media_placeholder_token_id=163605), text=deepseek(61)))
print(kimi.config.image_token_index, kimi.get_eagle3_aux_hidden_state_layers())
kimi.set_aux_hidden_state_layers((2, 30, 58))
print(kimi.language_model.model.aux_hidden_state_layers)
""",
        stub,
    )
    assert code == 0, said
    assert "lifted gate_image_token, gate_interface, gate_whitelist" in said
    assert "Got gemma3" in said
    assert "('DeepseekV2ForCausalLM', 'eagle3_lib.engines.inside.vllm_capture:CapturingDeepseek')" in said
    assert "('KimiK25ForConditionalGeneration', 'eagle3_lib.engines.inside.vllm_capture:CapturingKimiK25')" in said
    assert "163605 (2, 30, 58)\n(2, 30, 58)" in said


@pytest.mark.slow
def test_a_boundary_is_the_sum_of_the_layers_before_it(stub):
    """Layer n adds 10**n, and the embedding is 0: boundary 3 is 111, whatever later layers overwrite."""
    code, said = run(
        LAYERS
        + """
target, ids = deepseek(), torch.arange(3)
print(target.model(ids, ids, None))
target.set_aux_hidden_state_layers((0, 2, 3, 7))
hidden, captured = target.model(ids, ids, None)
print([int(tensor[0, 0]) for tensor in captured], int(hidden[0, 0]), tuple(captured[0].shape))

part = deepseek()
part.model.end_layer = 4
for refused, boundaries in ((target, (2, 8)), (part, (2,)), (deepseek(llama_4_scaling={}), (2,)), (deepseek().half(), (2,))):
    try:
        refused.set_aux_hidden_state_layers(boundaries)
    except vllm_plugin.Eagle3Error as error:
        print("refused:", error)
""",
        stub,
    )
    assert code == 0, said
    assert "vLLM's own\n[0, 11, 111, 1111111] 11111110 (3, 8)" in said
    assert "refused: boundaries: found [2, 8], expected some from 0 to 7" in said
    assert "refused: pipeline parallelism: found the layers of a part" in said
    assert "refused: the target's config.json: found llama_4_scaling" in said
    assert "refused: dtype: found float16" in said


def test_a_vllm_that_was_changed_by_hand_is_refused(stub, tmp_path):
    tree = tmp_path / "vllm"
    for path, text in STUB.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text.replace('"llama", "qwen"', '"kimi_k2", "llama", "qwen"'))
    code, said = run("from eagle3_lib.compat.vllm_plugin import register; register()", tmp_path)
    assert code == 1
    assert "found vLLM 0.16.0 with gate_image_token, gate_interface; expected stock 0.16.x" in said


def test_a_function_without_the_list_is_refused():
    with pytest.raises(Eagle3Error, match="found 0 lists of EAGLE-3 targets, expected one"):
        vllm_plugin.extend_whitelist(test_it_is_off_unless_asked_for, ("kimi_k2",))
