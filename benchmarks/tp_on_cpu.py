"""A real share of communication from a real trace without a GPU: vLLM on a CPU, the target divided over processes.

    OMP_NUM_THREADS=1 python benchmarks/tp_on_cpu.py

Stage 02 as params/tensor_parallel.yaml has it, on two cores: SmolLM2-135M with heads that two ranks can share, at tp 2
and beside it at tp 1, one request at a time and eight. The ranks exchange by gloo (c10d::allreduce_ in the trace), in
memory of one machine: the share tells of this machine, not of a network. Writes benchmarks/results/tp_on_cpu.json.
"""

import argparse
import datetime

from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import ProfileParams
from eagle3_lib.paths import project_path
from eagle3_lib.stages import profile
from recipes import divisible


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="2 or 4")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--start-timeout", type=int, default=500, help="seconds; the interpreters load at once")
    options = parser.parse_args()
    if not project_path(divisible.TARGET).exists():
        divisible.main()
    params = ProfileParams(
        run="tp_on_cpu",
        target=divisible.TARGET,
        setups={f"tp{options.ranks}": {"engine_args": ["--tensor-parallel-size", str(options.ranks)]}, "tp1": {}},
        batches=options.batches,
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
        **found,
    }
    write_json(project_path("benchmarks/results/tp_on_cpu.json"), result)
    for decode in found["decodes"]:
        print(
            f"{decode['setup']}, {decode['batch']} at a time: communication {decode['communication_share']:.1%} of busy "
            f"time, idle {decode['idle_share']:.1%}"
        )


if __name__ == "__main__":
    main()
