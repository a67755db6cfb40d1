"""The soak in small, and that it would see what it looks for."""

import json

import pytest

from benchmarks.soak import checks, main
from benchmarks.soak_load import BAD_CALLS, Answer, Load, draw_requests
from tests.checkpoints import SMALL, build_checkpoint

EXPECTED = Answer(200, [1, 2, 3], "length", True)


def test_a_small_soak_holds(tmp_path, capsys):
    model, file = str(build_checkpoint(tmp_path, SMALL)), tmp_path / "soak.json"
    sizes = ["--minutes", "0.03", "--streams", "24", "--requests", "5", "--kv-cache-memory-gb", "0.0007"]
    code = main([*sizes, "--model", model, "--memory-tolerance", "0.3", "--json", str(file)])
    line = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert code == 0 and result["passed"] and all(result["checks"].values()), line
    assert line.startswith("soak passed: 24 streams") and line.count("\n") == 1
    assert result["calls"]["completed"] > 0 and result["calls"]["bad"] >= len(BAD_CALLS)
    assert result["server"]["prefix_cache_hit_tokens_total"] > 0


@pytest.mark.parametrize(
    ("answer", "leaves", "kinds"),
    [
        (Answer(200, [1, 2, 3], "length", True), False, {"completed"}),
        (Answer(200, [1, 2, 4], "length", True), False, {"completed", "different"}),
        (Answer(200, [1, 2, 3], "stop", True), False, {"completed", "different"}),
        (Answer(200, [1, 2, 3], "length", False), False, {"completed", "different"}),
        (Answer(503, [], None, False, "busy"), False, {"completed", "different"}),
        (Answer(200, [1, 2]), True, {"left"}),
        (Answer(200, [2]), True, {"left", "different"}),
        (Answer(200, [1, 2], error="{}"), True, {"left", "different"}),
    ],
)
def test_answers_are_judged(answer, leaves, kinds):
    load = Load(0, draw_requests(1, 0), 0)
    load._judge(0, answer, EXPECTED, leaves)
    assert set(load.counts) == kinds and len(load.wrong) == ("different" in kinds)


GOOD = {
    "calls": {"completed": 5, "bad": 1},
    "statuses": {"200": 5, "400": 1},
    "at_the_end": {"num_requests_running": 0, "num_requests_waiting": 0, "free": 3, "cached": 4, "held": 0},
    "num_blocks": 7,
    "wrong_looks": 0,
    "memory_growth": 0.01,
    "open_files": [9, 10],
    "longest_stall_seconds": 1.0,
    "exit_code": 0,
}


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({}, set()),
        ({"calls": {"completed": 5, "bad": 1, "different": 1}}, {"answers equal"}),
        ({"calls": {"completed": 5, "bad": 1, "failed": 1}}, {"no call failed"}),
        ({"calls": {"completed": 5, "bad": 1, "wrongly taken": 1}}, {"bad requests refused"}),
        ({"statuses": {"200": 5, "503": 1}}, {"no 5xx"}),
        ({"num_blocks": 8}, {"blocks add up"}),
        ({"wrong_looks": 1}, {"blocks add up"}),
        ({"memory_growth": 0.04}, {"memory flat"}),
        ({"open_files": [9, 60]}, {"files closed"}),
        ({"longest_stall_seconds": 5.5}, {"tokens never stopped"}),
        ({"exit_code": 1}, {"server ended well"}),
    ],
)
def test_each_check_can_fail(change, failing):
    assert {name for name, holds in checks(GOOD | change, 0.03).items() if not holds} == failing
