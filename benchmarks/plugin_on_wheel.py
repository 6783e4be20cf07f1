"""The plugin that lifts vLLM 0.16's gates, run on vLLM 0.16.0's own classes. Writes results/plugin_on_wheel.json.

Downloads the wheel from the package index, unpacks its Python files into a temporary folder, and loads the plugin there as
vLLM does, in another process. The config check, the registry, the interface test and the decoder's loop are vLLM's; the
layers are small stand-ins, since those of a real target need a GPU. VLLM_TREE may name an unpacked package folder instead.

    python benchmarks/plugin_on_wheel.py
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from gates_of_wheels import unpacked

from eagle3_lib.files import write_json
from eagle3_lib.paths import ROOT

VERSION = "0.16.0"
DEPTH, HIDDEN, TOKENS = 8, 16, 5


def accepts(model_type: str) -> bool:
    """Whether vLLM's own check of a speculative config lets an EAGLE-3 target of this type pass."""
    from vllm.config.speculative import SpeculativeConfig

    target = SimpleNamespace(hf_text_config=SimpleNamespace(model_type=model_type))
    fields = {"tensor_parallel_size": None, "num_speculative_tokens": 4, "draft_model_config": None}
    fields |= {"disable_by_batch_size": None, "method": "eagle3", "target_model_config": target}
    asked = SimpleNamespace(**fields, verify_equal_vocab_size_if_draft_model=lambda: None)
    try:
        SpeculativeConfig._verify_args(asked)
    except ValueError:
        return False
    return True


def streams() -> dict:
    """What the registered DeepSeek class captures, beside the streams that its layers add up to."""
    import torch
    from vllm import ModelRegistry
    from vllm.model_executor.models import deepseek_v2
    from vllm.model_executor.models.interfaces import supports_eagle3

    registered = ModelRegistry.models["DeepseekV3ForCausalLM"].load_model_cls()
    outer, model = registered.__new__(registered), registered.model_cls.__new__(registered.model_cls)
    torch.nn.Module.__init__(outer)
    torch.nn.Module.__init__(model)
    torch.manual_seed(0)

    class Layer(torch.nn.Module):
        """Adds the last update to the residual, as vLLM's fused norm does, and returns its own update."""

        def __init__(self):
            super().__init__()
            self.weight = torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5

        def forward(self, positions, hidden, residual, *_):
            residual = hidden.clone() if residual is None else residual.add_(hidden)
            return torch.tanh(residual @ self.weight), residual

    model.layers = torch.nn.ModuleList(Layer() for _ in range(DEPTH))
    model.embed_tokens = torch.nn.Embedding(64, HIDDEN)
    model.norm = lambda hidden, residual: (hidden + residual, None)
    model.start_layer, model.end_layer, model.do_not_compile, model.config = 0, DEPTH, True, SimpleNamespace()
    outer.model, outer.config = model, SimpleNamespace()
    ids, positions = torch.arange(TOKENS), torch.arange(TOKENS)
    deepseek_v2.get_pp_group = lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True)
    with torch.no_grad():
        plain = model(ids, positions, None)
        wanted, stream = [], model.embed_tokens(ids)
        for layer in model.layers:
            wanted.append(stream)
            stream = stream + torch.tanh(stream @ layer.weight)
        wanted.append(stream)
        default = outer.get_eagle3_aux_hidden_state_layers()
        outer.set_aux_hidden_state_layers((0, *default, DEPTH))
        hidden, captured = model(ids, positions, None)
    pairs = zip((0, *default, DEPTH), captured, strict=True)
    return {
        "interface": supports_eagle3(outer),
        "default_boundaries_of_61_layers": list(
            registered.get_eagle3_aux_hidden_state_layers(SimpleNamespace(model=SimpleNamespace(layers=range(61))))
        ),
        "largest_difference": {str(b): float((tensor - wanted[b]).abs().max()) for b, tensor in pairs},
        "output_unchanged": bool(torch.equal(plain, hidden)),
    }


def inside() -> dict:
    """Load the plugin in this process, in which vllm is the unpacked wheel."""
    import vllm
    from vllm import ModelRegistry
    from vllm.config.speculative import SpeculativeConfig
    from vllm.model_executor.models.interfaces import SupportsEagle3, SupportsMultiModal

    from eagle3_lib.compat import vllm_plugin

    types = ("kimi_k2", "deepseek_v3", "llama", "gemma3")
    before = {name: accepts(name) for name in types}
    compiled = SpeculativeConfig.__pydantic_decorators__.model_validators["_verify_args"].func
    vllm_plugin.register()
    kimi = ModelRegistry.models["KimiK25ForConditionalGeneration"].load_model_cls()
    return {
        "vllm": vllm.__version__,
        "model_types_before": before,
        "model_types_after": {name: accepts(name) for name in types},
        "pydantic_calls_the_changed_code": compiled.__code__ is SpeculativeConfig._verify_args.__code__,
        "kimi_class": f"{kimi.__module__}:{kimi.__name__}",
        "kimi_interfaces": [base.__name__ for base in (SupportsEagle3, SupportsMultiModal) if base in kimi.__mro__],
        "kimi_keeps_its_processor": hasattr(kimi, "_processor_factory"),
        **streams(),
    }


def main() -> None:
    if sys.argv[1:] == ["--inside"]:
        print(json.dumps(inside()))
        return
    with TemporaryDirectory() as work:
        tree = Path(os.environ.get("VLLM_TREE") or unpacked("vllm", VERSION, Path(work)))
        path = os.pathsep.join([str(tree.parent), str(ROOT)])
        environment = os.environ | {"PYTHONPATH": path, "EAGLE3_LIFT_GATES": "1", "VLLM_PLUGINS": ""}
        command = [sys.executable, str(Path(__file__).resolve()), "--inside"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
    result = {"command": "python benchmarks/plugin_on_wheel.py", "date": time.strftime("%Y-%m-%d", time.gmtime())}
    result |= json.loads(done.stdout.splitlines()[-1])
    write_json(ROOT / "benchmarks/results/plugin_on_wheel.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
