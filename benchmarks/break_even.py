"""Does the break-even model foretell the speedup? Predicted from two K, measured at the others.

    OMP_NUM_THREADS=1 python benchmarks/break_even.py

On the quickstart's finetuned drafter (`make demo` first), the real vLLM on a CPU, float32, greedy, one request at a time, K
= 1 to 5. A plain server stays up, and beside it one server a K: each prompt is answered by one and then by the other, so that
a machine whose speed drifts slows both; of a prompt's repeats the fastest counts, since other work on the machine can only
slow it. Times are of decode steps after prefill; an answer's last round counts with all that it accepted, also beyond the
limit of tokens. The model (eagle3_lib/verdict/break_even.py) is fitted to the rounds of two K and takes the acceptance curve of the
larger; in a second reading it has one K only. Writes benchmarks/results/break_even.json.
"""

import argparse
import contextlib
import datetime
import os

from eagle3_lib.compat import launch
from eagle3_lib.engines import base, serving
from eagle3_lib.files import write_json
from eagle3_lib.manifest import hardware, versions
from eagle3_lib.params import BenchmarkParams
from eagle3_lib.paths import project_path
from eagle3_lib.targets import targets
from eagle3_lib.targets.answers import read_answers
from eagle3_lib.verdict import acceptance, break_even

DRAFTER = "runs/quickstart/train/drafter"
DATA = "runs/quickstart/generate"
LARGEST = 5
FITTED, ONE = (2, 5), 4
OUT = "runs/break_even"


def serve(drafts: int):
    """A server of the quickstart's target with so many drafts a round (0: plain), for a ``with`` block."""
    mode = {"mode": "finetuned", "drafter": DRAFTER, "num_speculative_tokens": drafts} if drafts else {}
    params = BenchmarkParams(out=f"{OUT}/k{drafts}", **mode)
    speculation = base.Speculation(params.mode, params.drafter, params.num_speculative_tokens)
    folder = targets.resolve(params.target)
    return launch.serve(params, folder, project_path(params.out) / "server.log", speculation)


def timed(server: base.Server, prompt: list[int], tokens: int) -> dict:
    """Seconds and rounds of one answer after prefill; a plain step is a round that accepts nothing."""
    answer = serving.complete(server, prompt, tokens)
    rounds = answer.accepted if server.tells_rounds else answer.rounds_from_chunks()
    seconds = round(answer.seconds - answer.first_token_s, 5)
    return {"seconds": seconds, "rounds": rounds}


def compare_with(plain: base.Server, drafts: int, prompts: list[list[int]], tokens: int, repeats: int) -> dict:
    """Decode all prompts in turn on both servers, ``repeats`` times after a warm-up."""
    rows: dict[str, list[dict]] = {"plain": [], "speculative": []}
    with serve(drafts) as server:
        for warm in (plain, server):
            serving.complete(warm, prompts[0], tokens)
        for _ in range(repeats):
            for prompt in prompts:
                rows["plain"].append(timed(plain, prompt, tokens))
                rows["speculative"].append(timed(server, prompt, tokens))
    result = {"K": drafts, **summary(rows, len(prompts), drafts)}
    print(result, flush=True)
    return result | {"requests": rows}


def summary(rows: dict[str, list[dict]], prompts: int, drafts: int) -> dict:
    """Speedup, a round in plain steps, and the acceptance; ``rows``: all prompts of one repeat after another."""
    step_s = {}
    for name, some in rows.items():
        fastest = [min(some[prompt::prompts], key=lambda row: row["seconds"]) for prompt in range(prompts)]
        step_s[name] = sum(row["seconds"] for row in fastest) / sum(len(row["rounds"]) for row in fastest)
    counts = acceptance.request_counts([row["rounds"] for row in rows["speculative"]], drafts)
    length, ratio = float(acceptance.mean_length(counts)), step_s["speculative"] / step_s["plain"]
    return {
        "speedup": round(length / ratio, 4),
        "round": round(ratio, 4),
        "step_s": {name: round(value, 5) for name, value in step_s.items()},
        "curve": acceptance.curve(counts).round(4).tolist(),
        "mean_length": round(length, 4),
        "rounds": int(counts[:, 0].sum()),
    }


def predicted(fitted: tuple[int, ...], runs: dict[int, dict]) -> dict:
    """The model's speedups beside the measured ones, and its largest relative error where it was not fitted."""
    cost = break_even.fit(1.0, {drafts: runs[drafts]["round"] for drafts in fitted})
    foretold = break_even.predict(cost, runs[max(fitted)]["curve"], LARGEST)
    rows = []
    for row in foretold:
        measured = runs[row["K"]]["speedup"]
        error = round(row["speedup"] / measured - 1, 4)
        rows.append({**row, "measured": measured, "error": error, "fitted": row["K"] in fitted})
    return {
        "fitted": fitted,
        "base_over_plain": round(cost.base, 4),
        "per_draft_over_plain": round(cost.per_draft, 4),
        "rows": rows,
        "largest_error": max(abs(row["error"]) for row in rows if not row["fitted"]),
        "recommended": break_even.recommend(foretold),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    answers = [answer for answer in read_answers(DATA) if answer.split == "held_out"]
    prompts = [answer.prompt_ids for answer in answers[: options.prompts]]
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(serve(0))
        runs = {
            drafts: compare_with(plain, drafts, prompts, options.tokens, options.repeats)
            for drafts in range(1, LARGEST + 1)
        }
    result = {
        "command": f"OMP_NUM_THREADS=1 python benchmarks/break_even.py --prompts {options.prompts} --tokens {options.tokens} "
        f"--repeats {options.repeats}",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "load_average_at_start": round(load, 1),
        "versions": versions(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", 0)),
        **vars(options),
        "from_two_K": predicted(FITTED, runs),
        "from_one_K": predicted((ONE,), runs),
        "best_measured": max(runs, key=lambda drafts: runs[drafts]["speedup"]),
        "runs": list(runs.values()),
    }
    write_json(project_path("benchmarks/results/break_even.json"), result)
    for name in ("from_two_K", "from_one_K"):
        print(
            f"{name}: largest error {result[name]['largest_error']:.1%}, recommends K = {result[name]['recommended']}"
        )
    print(f"measured best: K = {result['best_measured']}")


if __name__ == "__main__":
    main()
