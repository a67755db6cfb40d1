"""The script for two GPUs, dry on two gloo processes: items are kept, failures run again, wrong sums are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import two_gpus, two_gpus_soak, two_gpus_tokens
from benchmarks.parts import Part, Unable
from benchmarks.two_gpus_parts import PARTS
from engine.comm.dispatch_reference import ReferenceDispatcher
from engine.comm.parallel_state import ParallelState

DRY = ("--device", "cpu", "--dry-run")


def run(directory: Path, *arguments: str) -> tuple[int, dict]:
    code = two_gpus.main([*arguments, *DRY, "--out", str(directory)])
    return code, {file.stem: json.loads(file.read_text()) for file in directory.glob("*.json")}


def test_soak_on_two_ranks(tmp_path):
    code, files = run(tmp_path, "--part", "soak_ep1", "--only", "nccl_agrs,deepep")
    assert code == 0 and files["soak_ep1"]["complete"]
    items = files["soak_ep1"]["items"]
    ranks = items["nccl_agrs"]["ranks"]
    assert [rank["replays"] for rank in ranks] == [60, 60] and not any(rank["wrong"] for rank in ranks)
    assert "runs on CUDA GPUs alone, not on cpu" in items["deepep"]["skipped"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["steps_ep2", "steps_ep1", "soak_ep2", "tokens_float32", "latency"])
def test_other_parts_on_two_ranks(tmp_path, part):
    code, files = run(tmp_path, "--part", part, "--only", "allreduce,nccl_agrs")
    assert code == 0, files[part]["items"]


class _LosesARow(ReferenceDispatcher):
    """Sums all rows but the last."""

    def combine(self, partial_TD, handle, residual_TD, norm, shared_TD=None):
        partial_TD[-1] = 0
        return super().combine(partial_TD, handle, residual_TD, norm, shared_TD)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "passes"), [(ReferenceDispatcher, True), (_LosesARow, False)])
def test_a_soak_finds_a_row_that_is_lost(monkeypatch, kind, passes, dtype):
    monkeypatch.setattr(two_gpus_soak, "build", lambda name, parallel, limits: kind(parallel, limits))
    sizes = {"sizes": [1, 4], "width": 32, "num_experts": 8, "top_k": 2, "dtype": dtype}
    found = two_gpus_soak.soak_of_rank(ParallelState(), "reference", 40, seconds=60, **sizes)
    assert found["passed"] == passes and (found["wrong"] > 0) != passes and found["replays"] == 40


@pytest.fixture
def part(monkeypatch):
    """A part whose second item fails as long as it is told to, and the calls it got."""
    calls, fails = [], [True]

    def first(done, seconds):
        calls.append("first")
        return {"passed": True}

    def second(done, seconds):
        calls.append("second")
        assert done["first"]["passed"]
        if fails[0]:
            raise RuntimeError("not today")
        return {"value": 1}

    def third(done, seconds):
        raise Unable("needs what is not here")

    items = (("first", first), ("second", second), ("third", third))
    monkeypatch.setitem(PARTS, "made_up", Part("a part", lambda options: iter(items)))
    return calls, fails


def test_what_is_complete_does_not_run_again(tmp_path, part):
    calls, fails = part
    code, files = run(tmp_path, "--part", "made_up")
    assert code == 1 and not files["made_up"]["complete"]
    assert files["made_up"]["items"]["second"]["error"] == "RuntimeError: not today"
    fails[0] = False
    code, files = run(tmp_path, "--part", "made_up")
    assert code == 0 and files["made_up"]["complete"] and calls == ["first", "second", "second"]
    assert files["made_up"]["items"]["third"]["skipped"] == "needs what is not here"
    assert run(tmp_path, "--part", "made_up")[0] == 0 and len(calls) == 3
    assert run(tmp_path, "--part", "made_up", "--again")[0] == 0 and len(calls) == 5


def test_results_of_other_options_are_not_mixed(tmp_path, part):
    run(tmp_path, "--part", "made_up")
    with pytest.raises(SystemExit, match="other options"):
        run(tmp_path, "--part", "made_up", "--only", "allreduce")


def test_no_item_begins_without_time(tmp_path, part):
    code, files = run(tmp_path, "--part", "made_up", "--seconds", "1")
    assert code == 1 and files["made_up"]["items"] == {} and part[0] == []


def test_a_failed_item_is_not_a_pass(tmp_path, monkeypatch):
    items = (("only", lambda done, seconds: {"passed": False}),)
    monkeypatch.setitem(PARTS, "made_up", Part("a part", lambda options: iter(items)))
    code, files = run(tmp_path, "--part", "made_up")
    assert code == 1 and files["made_up"]["complete"]


def test_parts_that_cannot_run_yet_say_what_they_need(tmp_path):
    code, files = run(tmp_path, "--parts", "eagle3,http")
    assert code == 0
    assert "needs a part with a draft" in files["eagle3"]["items"]["all"]["skipped"]
    assert "needs fastapi" in files["http"]["items"]["all"]["skipped"]


def test_an_unknown_part_is_refused_with_the_known_ones(capsys):
    assert two_gpus.main(["--part", "tokens"]) == 2
    assert "no part is called 'tokens'" in capsys.readouterr().err


def answer(*tokens: int) -> list[dict]:
    return [{"prompt": [1, 2], "tokens": list(tokens), "logprobs": []}]


def test_tokens_are_compared_exactly():
    answers = {"ep2 allreduce eager": answer(3, 4), "ep2 nccl_agrs eager": answer(3, 5)}
    found = two_gpus_tokens.compare_exactly(answers, answer(3, 4))
    assert not found["passed"] and found["different"] == ["ep2 nccl_agrs eager"]


@pytest.mark.parametrize(("scores", "passes"), [({"4": -1.0, "5": -1.25}, True), ({"4": -1.0, "5": -2.0}, False)])
def test_a_parting_passes_where_the_tokens_are_nearly_even(monkeypatch, scores, passes):
    asked = []

    def generate(settings, prompts, num_tokens, seconds, logprobs):
        asked.append(prompts)
        return [{"logprobs": [scores]} for _ in prompts]

    monkeypatch.setattr(two_gpus_tokens, "generate", generate)
    answers = {"ep2 allreduce eager": answer(3, 5), "ep2 nccl_agrs eager": answer(3, 4)}
    found = two_gpus_tokens.compare_families(answers, answer(3, 4), {}, 1.0)
    assert asked == [[[1, 2, 3]]] and found["passed"] == passes and len(found["partings"]) == 1
    assert found["partings"][0]["gap"] == pytest.approx(abs(scores["4"] - scores["5"]))


def test_one_family_may_not_part_at_all():
    answers = {"ep2 allreduce eager": answer(3, 4), "ep2 allreduce graphs": answer(3, 5)}
    found = two_gpus_tokens.compare_families(answers, answer(3, 4), {}, 1.0)
    assert not found["passed"]
    assert found["different_within_a_family"] == [["ep2 allreduce eager", "ep2 allreduce graphs"]]


def test_a_token_that_is_not_among_the_best_is_no_near_tie(monkeypatch):
    monkeypatch.setattr(two_gpus_tokens, "generate", lambda *_: [{"logprobs": [{"4": -0.1}]}])
    found = two_gpus_tokens.compare_families({"ep2 allreduce eager": answer(9)}, answer(4), {}, 1.0)
    assert not found["passed"] and found["partings"][0]["gap"] is None


def test_the_soak_knows_the_types_it_runs_with():
    assert set(two_gpus_soak.TOLERANCE) == {torch.float32, torch.bfloat16}
