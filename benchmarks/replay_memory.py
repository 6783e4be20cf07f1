"""How much memory the replay of one long text takes beyond the drafter and the target's features.

    OMP_NUM_THREADS=1 python benchmarks/replay_memory.py

Counts at all slots of one text of 8,192 tokens, K = 2, float32, for a drafter of 64 heads with grouped-query attention, one
of 64 heads with latent attention (head sizes of Kimi-K2), and the drafter of SmolLM2. Features are random; the drafter's
head is zeros and the text its first token, so that every draft is right and all steps run at all slots, the most that there
is to hold. Each case runs in a process of its own: its peak of resident memory less what it held just before the replay.
Of that, ``held_gib`` are the hidden states, keys and values of all slots, and the rest belongs to the rows at hand.
Writes benchmarks/results/replay_memory.json.
"""

import argparse
import datetime
import json
import resource
import subprocess
import sys
import time

import psutil
import torch

from eagle3_lib.drafter import checkpoint
from eagle3_lib.drafter.model import Drafter, DrafterConfig, LatentSizes
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import BASE_DRAFTER
from eagle3_lib.paths import project_path
from eagle3_lib.targets import capture
from eagle3_lib.verdict import replay

GIB = 2**30
TOKENS, STEPS = 8192, 2
SIXTY_FOUR = DrafterConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    draft_vocab_size=32000,
    target_hidden_size=2048,
    boundaries=(2, 24, 45),
    own_embedding=True,
)
LATENT = LatentSizes(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
CONFIGS = {
    "64 heads": lambda: SIXTY_FOUR,
    "64 heads, latent": lambda: SIXTY_FOUR.with_(latent=LATENT, num_key_value_heads=64, head_dim=64),
    "SmolLM2": lambda: checkpoint.load(BASE_DRAFTER, 30).drafter.config,
}


def measure(case: str, tokens: int) -> dict:
    """One case, in this process."""
    config = CONFIGS[case]()
    drafter = Drafter(config).eval()
    drafter.initialise()
    torch.nn.init.normal_(drafter.embed_tokens.weight, std=0.02)
    torch.nn.init.zeros_(drafter.lm_head.weight)
    streams = {(capture.RESIDUAL, k): torch.randn(tokens, config.target_hidden_size) for k in config.boundaries}
    texts = replay.Texts([[0] * tokens], [1], [streams])
    del streams
    before, started = psutil.Process().memory_info().rss, time.perf_counter()
    (counts,) = replay.counts_at(replay.correct(drafter), texts, replay.all_slots(texts), STEPS)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert counts == [min(STEPS, tokens - 2 - slot) for slot in range(tokens - 1)], "every draft was right"
    sizes = config.latent
    head = sizes.qk_head_dim + sizes.v_head_dim if sizes else 2 * config.head_dim
    held = (tokens - 1) * 4 * (config.hidden_size + config.num_key_value_heads * head)
    return {
        "case": case,
        "tokens": tokens,
        "heads": config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "features_gib": round(sum(stream.nbytes for stream in texts.streams.values()) / GIB, 3),
        "peak_above_gib": round((peak - before) / GIB, 3),
        "held_gib": round(held / GIB, 3),
        "all_scores_gib": round(config.num_attention_heads * (tokens - 1) ** 2 * 4 / GIB, 3),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--case", choices=CONFIGS, help="measure this one here and print it")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.tokens)))
        return
    rows = []
    for case in CONFIGS:
        command = [sys.executable, __file__, "--case", case, "--tokens", str(options.tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1])
    result = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/replay_memory.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "num_speculative_tokens": STEPS,
        "rows_at_once": replay.ROWS,
        "scores_at_once": replay.SCORES,
        "rows": rows,
    }
    write_json(project_path("benchmarks/results/replay_memory.json"), result)


if __name__ == "__main__":
    main()
