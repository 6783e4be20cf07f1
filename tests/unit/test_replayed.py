"""replay.json: plain JSON, one request in memory at a time, the old file kept until the new one is whole."""

import json
import re
import tracemalloc

import pytest

from eagle3_lib.errors import Eagle3Error
from eagle3_lib.verdict import diagnose, replayed

HYPOTHESES = 36
AGREEMENT = {"rounds": 12, "equal": 11, "cut": 1}


def request(name: str, rounds: int) -> dict:
    rows = [
        {"slot": s, "drafted": 4, "engine": s % 3, "replay": s % 3, "cut": False, "sure": True} for s in range(rounds)
    ]
    counts = [row["engine"] for row in rows]
    return {
        "id": name,
        "prompt_length": 1,
        "output_length": 1 + sum(counts) + rounds,
        "engine_rounds": counts,
        "drafted": [4] * rounds,
        "replay_rounds": counts,
        "replay_drafted": [4] * rounds,
        "unjudged": None,
        "without_drafts": 0,
        "rows": rows,
        "hypotheses": {f"fault {i}": [0] * rounds for i in range(HYPOTHESES)},
    }


def write(path, requests):
    with replayed.Writer(path, {"drafter": "base", "positions": 4, "dtype": "float32"}) as writer:
        for one in requests:
            writer.add(one)
        writer.finish({"agreement": AGREEMENT})


def test_what_is_written_is_read(tmp_path):
    path, requests = tmp_path / "replay.json", [request(str(i), 4) for i in range(3)]
    write(path, requests)
    found = replayed.read(path)
    assert list(found["requests"]) == requests == json.loads(path.read_text())["requests"]
    assert (found["requests"][-1], len(found["requests"]), found["requests"][:2]) == (requests[2], 3, requests[:2])
    rest = {key: value for key, value in found.items() if key != "requests"}
    assert rest == {"schema": 2, "drafter": "base", "positions": 4, "dtype": "float32", "agreement": AGREEMENT}


def test_a_file_without_requests_or_of_another_layout(tmp_path):
    write(tmp_path / "none.json", [])
    assert len(replayed.read(tmp_path / "none.json")["requests"]) == 0
    whole = {"schema": 2, "drafter": "base", "positions": 4, "requests": [request("7", 2)]}
    (tmp_path / "other.json").write_text(json.dumps(whole, indent=1))
    assert replayed.read(tmp_path / "other.json")["requests"] == [request("7", 2)]


def test_a_stage_that_ends_early_leaves_the_old_file(tmp_path):
    path = tmp_path / "replay.json"
    write(path, [request("old", 2)])
    with pytest.raises(KeyboardInterrupt), replayed.Writer(path, {"drafter": "base"}) as writer:
        writer.add(request("new", 2))
        raise KeyboardInterrupt
    assert [one["id"] for one in replayed.read(path)["requests"]] == ["old"]
    assert [found.name for found in tmp_path.iterdir()] == ["replay.json"]


def test_a_damaged_or_missing_file_is_told(tmp_path):
    with pytest.raises(Eagle3Error, match="replay.json: no such file"):
        replayed.read(tmp_path / "replay.json")
    (tmp_path / "replay.json").write_text('{"drafter": ')
    with pytest.raises(Eagle3Error, match="replay.json: not JSON.*run stage 08 again"):
        replayed.read(tmp_path / "replay.json")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "schema: found none, expected 2; run the stage that writes it again"),
        ({"schema": 1, "drafter": "base"}, "schema: found 1, expected 2"),
        ({"schema": 2, "drafter": "base", "requests": []}, "positions: found none, expected this field"),
        ([], "found [], expected the fields of a Replay"),
        (
            {
                "schema": 2,
                "drafter": "base",
                "positions": 4,
                "requests": [{"id": "7", "replay_rounds": [], "rows": []}],
            },
            "requests: 7: engine_rounds: found none, expected this field",
        ),
    ],
)
def test_another_file_is_refused_by_its_field(tmp_path, values, said):
    (tmp_path / "replay.json").write_text(json.dumps(values))
    with pytest.raises(Eagle3Error, match=re.escape(f"replay.json: {said}")):
        replayed.read(tmp_path / "replay.json")


def test_a_damaged_request_is_named(tmp_path):
    path = tmp_path / "replay.json"
    write(path, [request("0", 2), request("1", 2) | {"engine_rounds": "1 2"}])
    with pytest.raises(Eagle3Error, match=re.escape("replay.json: requests: [1]: engine_rounds: found '1 2'")):
        list(replayed.read(path)["requests"])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_requests(tmp_path):
    """10,000 requests of 1,000 rounds once took about 45 GiB."""
    path, peaks = tmp_path / "replay.json", {}
    for count in (5, 40):
        tracemalloc.start()
        write(path, (request(str(i), 1000) for i in range(count)))
        diagnose.judge(replayed.read(path))
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    for_each = (peaks[40] - peaks[5]) / 35
    assert peaks[40] + for_each * 10_000 < 4 * 2**30
    assert for_each < 150_000  # bytes: counts of a request's rounds as lists, slots as integers
