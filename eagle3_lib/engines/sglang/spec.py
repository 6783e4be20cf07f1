"""What the project knows of SGLang.

What it counts was read in SGLang 0.5.8 to 0.5.12, 0.5.14 to 0.5.16, 0.5.23 (srt/managers/tokenizer_manager.py; the
running rate in srt/managers/scheduler_metrics_mixin.py, later srt/observability/ and
scheduler_components/metrics_reporter.py). It computes the drafted tokens of an answer as rounds * (draft tokens - 1) of
the configuration, and does not count them.

What changes the meaning of these counts was read in SGLang 0.5.8, 0.5.16, 0.5.23:

- srt/server_args.py, srt/arg_groups/fields/spec.py (0.5.23): options and defaults; srt/arg_groups/speculative_hook.py:
  topk 1 makes the draft tokens steps + 1, with a warning; block verification turns rejection sampling on; without steps
  a Llama or Grok target gets a tree (5 steps, topk 4, 8 draft tokens); n-gram's breadth is its topk.
- srt/speculative/eagle_utils.py (eagle_sample): thresholds reach the sampling kernel alone, greedy batches do not; on
  cpu and xpu every batch is verified greedily; SGLANG_SIMULATE_ACC_LEN above 0 replaces the counts of both. SGLang itself
  renames the older SGL_SIMULATE_ACC_LEN.
- srt/speculative/eagle_worker_v2.py, spec_utils.py, srt/sampling/sampling_params.py: rejection sampling draws the
  drafts. A request at temperature 0 is one at temperature 1 with top_k 1: 0.5.16 draws its drafts at temperature 1,
  0.5.23 still the one that follows prefill. So it is refused at temperature 0 too.
- srt/speculative/adaptive_spec_params.py: adaptive steps vary between rounds, down to 0; no answer tells those of a
  round, and spec_num_proposed_drafts (srt/managers/tokenizer_manager.py) multiplies rounds by the configured number.

SGLang computes --mem-fraction-static from the GPU's size; the share here is a usual outcome.
"""

from ..definitions import Definitions
from ..settings import (
    OTHER_DRAFTS,
    TREE,
    Given,
    Setting,
    is_above,
    is_on,
    is_one_of,
    is_other_than,
    number,
)
from ..spec import EngineSpec


def not_one_more_than_steps(draft_tokens: object, given: Given) -> bool:
    steps = given.get("--speculative-num-steps")
    if draft_tokens is None or steps is None or given.get("--speculative-algorithm") == "NGRAM":
        return False
    return number(draft_tokens) != number(steps) + 1


def left_to_sglang(steps: object, given: Given) -> bool:
    return steps is None and given.get("--speculative-algorithm") in ("EAGLE", "EAGLE3", "NEXTN")


def _since(since: tuple[int, ...], accepted: str, drafted: str, histogram: str, bonus_in_rate: bool) -> Definitions:
    return Definitions(
        since,
        "spec_verify_ct",
        accepted,
        drafted,
        histogram,
        root_is_drafted=True,
        bonus_in_rate=bonus_in_rate,
        prefill_in_length=True,
    )


DEFINITIONS = (
    _since((0, 0, 0), "spec_accept_token_num", "spec_draft_token_num", "", True),
    _since((0, 5, 9), "spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram", True),
    _since((0, 5, 11), "spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram", False),
    _since((0, 5, 12), "spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram", False),
)

SETTINGS = (
    Setting("--speculative-eagle-topk", is_above(1), TREE, "1"),
    Setting("--speculative-ngram-max-bfs-breadth", is_above(1), TREE, "1"),
    Setting(
        "--speculative-num-draft-tokens",
        not_one_more_than_steps,
        "the drafts are a tree, or SGLang changes the number without being asked",
        "--speculative-num-steps + 1, a chain and its root",
    ),
    Setting(
        "--speculative-num-steps",
        left_to_sglang,
        "SGLang then chooses by the target's architecture, for some a tree",
        "the number of drafts, K",
    ),
    Setting(
        "--speculative-accept-threshold-single",
        is_other_than(1),
        "every draft with a probability above it is accepted",
        "1, or temperature 0",
        greedy_too=False,
    ),
    Setting(
        "--speculative-accept-threshold-acc",
        is_other_than(1),
        "a draft is accepted with its probability divided by it",
        "1, or temperature 0",
        greedy_too=False,
    ),
    Setting("--speculative-use-rejection-sampling", is_on, f"{OTHER_DRAFTS}, at temperature 0 too", "none"),
    Setting(
        "--speculative-use-block-verification",
        is_on,
        f"{OTHER_DRAFTS}, at temperature 0 too, and are accepted or rejected jointly",
        "none",
    ),
    Setting(
        "--speculative-adaptive",
        is_on,
        "K varies between rounds, and no answer tells the drafts of a round",
        "none, with a fixed --speculative-num-steps",
    ),
    Setting(
        "--device",
        is_one_of("cpu", "xpu"),
        "drafts are verified by the target's likeliest token, whatever the temperature",
        "temperature 0",
        greedy_too=False,
    ),
)

SPEC = EngineSpec(
    name="sglang",
    distributions=("sglang",),
    read=((0, 5, 8), (0, 5, 23)),
    definitions=DEFINITIONS,
    settings=SETTINGS,
    made_up_by=("SGLANG_SIMULATE_ACC_LEN", "SGL_SIMULATE_ACC_LEN"),
    optional=frozenset({"--disable-cuda-graph"}),
    tensor_parallel_options=("--tensor-parallel-size", "--tp-size", "--tp"),
    prefill_chunk_options=("--chunked-prefill-size",),
    memory_share_option="--mem-fraction-static",
    memory_share=0.85,
    ids_in_eagle_config=True,
    outer_boundaries=False,
    models_folder="srt/models",
    eagle3_interface="set_eagle3_layers_to_capture",
    kernel_packages=("sgl-kernel", "sglang-kernel"),
    main_libraries=("common_ops.",),
    kernel_build="git clone https://github.com/sgl-project/sglang && cd sglang/sgl-kernel && {arch} make build MAX_JOBS=8 "
    "(in the engine's environment; 48 minutes were seen for SM120)",
)
