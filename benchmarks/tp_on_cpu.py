"""A real share of communication from a real trace without a GPU: vLLM on a CPU, the target divided over three processes.

    OMP_NUM_THREADS=1 python benchmarks/tp_on_cpu.py

SmolLM2-135M has 9 query heads and 3 KV heads, so three ranks hold 3 and 1. Stage 02 traces one plain decode; the ranks
exchange by gloo (c10d::allreduce_ in the trace). Where there are fewer cores than ranks, a rank that waits for
another's turn on a core is inside its all-reduce: then the share tells of the machine, not of a network. Writes
benchmarks/results/tp_on_cpu.json.
"""

import argparse
import datetime

from eagle3_lib import profile
from eagle3_lib.params import ProfileParams
from eagle3_lib.provenance import hardware, project_path, versions, write_json

RANKS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--start-timeout", type=int, default=330, help="seconds; three interpreters load at once")
    options = parser.parse_args()
    params = ProfileParams(
        run="tp_on_cpu",
        engine_args=["-tp", str(RANKS)],
        decode_tokens=options.tokens,
        max_model_len=256,
        start_timeout_s=options.start_timeout,
    )
    found = profile.run(params)
    result = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/tp_on_cpu.py",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "engine_args": params.engine_args,
        **found,
    }
    write_json(project_path("benchmarks/results/tp_on_cpu.json"), result)
    for rank in found["ranks"]:
        print(f"rank {rank['rank']}: communication {rank['communication_share']:.1%}, idle {rank['idle_share']:.1%}")


if __name__ == "__main__":
    main()
