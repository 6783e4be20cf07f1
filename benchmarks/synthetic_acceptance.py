"""Do the parsers give back an acceptance that is known? vLLM accepts drafts at configured rates instead of by the target.

    python benchmarks/synthetic_acceptance.py --engine-python PATH [--data FOLDER]     on a GPU

With rejection_sample_method "synthetic" position i is accepted in the configured share of rounds, whatever the drafter
proposes. All prompts are asked one at a time, so that streamed chunks are rounds in every version; beside them stand the
engine's counters and, where it tells them, rounds, histograms and totals of each answer. Each answer gives its first
TOKENS / (K + 1) rounds: the token limit cuts none of these, whereas leaving out the round that it cuts would leave out
long rounds more often than short ones. The intervals are exact binomial ones (Clopper and Pearson 1934), at a level at
which all positions hold together in 95 % of runs. Needs a GPU: the CPU build of vLLM 0.32.0 refuses it
(utils/cpu_triton_utils.py: "Synthetic acceptance not supported with CPU sampling"). Writes
benchmarks/results/synthetic_acceptance.json.
"""

import argparse
import datetime

from scipy import stats

from eagle3_lib.compat import launch
from eagle3_lib.engines import base, serving
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import BenchmarkParams
from eagle3_lib.paths import project_path
from eagle3_lib.stages import benchmark
from eagle3_lib.targets import targets
from eagle3_lib.targets.answers import read_answers
from eagle3_lib.verdict import acceptance

DRAFTER = "drafters/smollm2-135m-eagle3"
RATES = [0.8, 0.6, 0.3, 0.1]
TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--data", default="runs/quickstart/generate", help="the folder of stage 03 whose prompts are asked"
    )
    options = parser.parse_args()
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": RATES}
    params = BenchmarkParams(
        run="synthetic",
        mode="base",
        drafter=DRAFTER,
        engine_python=options.engine_python,
        dtype=options.dtype,
        speculative_options=synthetic,
    )
    speculation = base.Speculation(params.mode, params.drafter, len(RATES), synthetic)
    prompts = [answer.prompt_ids for answer in read_answers(options.data)]
    log = project_path(params.out) / "server.log"
    with launch.serve(params, targets.resolve(params.target), log, speculation) as server:
        before = serving.counters(server)
        answers = [serving.complete(server, prompt, TOKENS) for prompt in prompts]
        after, version = serving.counters(server), server.version
    whole = TOKENS // (len(RATES) + 1)
    chunks = [answer.rounds_from_chunks()[:-1][:whole] for answer in answers]
    read = acceptance.summary(chunks, len(RATES))
    level = 1 - 0.05 / len(RATES)
    intervals = [stats.binomtest(accepted, read["rounds"]).proportion_ci(level) for accepted in read["accepted"]]
    told = [answer for answer in answers if answer.accepted is not None]
    equal = sum(answer.accepted[:-1] == answer.rounds_from_chunks()[:-1] for answer in told)
    result = {
        "command": "python benchmarks/synthetic_acceptance.py --engine-python PATH",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "versions": versions(),
        "engine_version": version,
        "configured": RATES,
        "chunks": {key: read[key] for key in ("requests", "rounds", "accepted", "curve", "mean_length")},
        "intervals": [[interval.low, interval.high] for interval in intervals],
        "configured_within_interval": [
            bool(interval.low <= rate <= interval.high) for interval, rate in zip(intervals, RATES, strict=True)
        ],
        "told_equal_chunks": [equal, len(told)],
        "cross_check": benchmark.cross_check(
            [{"id": str(index), **vars(answer)} for index, answer in enumerate(told)], before, after, len(RATES)
        ),
    }
    write_json(project_path("benchmarks/results/synthetic_acceptance.json"), result)
    for key in ("configured", "chunks", "intervals", "configured_within_interval", "told_equal_chunks", "cross_check"):
        print(f"{key}: {result[key]}")


if __name__ == "__main__":
    main()
