"""The script for two GPUs, dry on two gloo processes: items are kept, failures run again, wrong sums are found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import (
    drills,
    parts,
    silent_steps,
    two_gpus,
    two_gpus_parts,
    two_gpus_soak,
    two_gpus_steps,
    two_gpus_tokens,
)
from benchmarks.parts import SECONDS, Part, Unable
from benchmarks.two_gpus_parts import CALLS, PARTS, Options
from engine.bench.__main__ import parser as bench_parser
from engine.comm.dispatch_reference import ReferenceDispatcher
from engine.comm.parallel_state import ParallelState
from engine.config import TINY_CHECKPOINT
from engine.doctor.__main__ import parser as doctor_parser

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
@pytest.mark.parametrize("part", sorted({*PARTS} - {"soak_ep1"}))
def test_other_parts_on_two_ranks(tmp_path, part):
    code, files = run(tmp_path, "--part", part, "--only", "allreduce,nccl_agrs,auto,silent")
    assert code == 0 and files[part]["complete"], files[part]["items"]


def test_one_session_runs_every_part_that_shows_something_of_its_own():
    listed = [name for call in CALLS for name in call]
    assert sorted(listed) == sorted({*PARTS} - {"doctor", "latency"})
    assert all(part.seconds > 0 for part in PARTS.values())
    assert all(sum(PARTS[name].seconds for name in call) < SECONDS for call in CALLS)
    assert sum(PARTS[name].seconds for name in listed) <= 1500


def test_the_list_says_how_to_run_all(capsys):
    assert two_gpus.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"--parts {','.join(call)} " in out for call in CALLS) and "comm_2xh200.json" in out


def commands_of(monkeypatch, part: str, options: Options) -> dict[str, list[str]]:
    """Key -> the words that the part's programs are started with."""
    started = []

    def start(command, **_):
        started.append(command[command.index("-m") + 2 :])
        return SimpleNamespace(returncode=1, stdout="", stderr="")

    monkeypatch.setattr(parts.subprocess, "run", start)
    items = dict(PARTS[part].items(options))
    for call in items.values():
        with pytest.raises(RuntimeError, match="wrote nothing"):
            call({}, 60.0)
    return dict(zip(items, started, strict=True))


@pytest.mark.parametrize("options", [Options("cuda", False), Options("cpu", True)])
def test_programs_know_the_options_that_they_are_given(monkeypatch, options):
    for words in (commands_of(monkeypatch, part, options) for part in ("comm", "http")):
        asked = [bench_parser().parse_args(one) for one in words.values()]
        assert asked and all(one.tp == 2 and one.device == options.device for one in asked)
    words = next(iter(commands_of(monkeypatch, "doctor", options).values()))
    assert doctor_parser().parse_args(words).tp == 2


@pytest.mark.parametrize("options", [Options("cuda", False), Options("cpu", True)])
def test_each_drill_is_one_start_and_one_fault(monkeypatch, capsys, options):
    commands, made = commands_of(monkeypatch, "drills", options), []
    reason = "rank 1 ended without a word"

    def drill(start, fault, rank, arguments):
        made.append(f"{start} {fault}")
        return drills.Outcome(start, fault, rank, 1.0, 2.0, 1, 0, reason)

    monkeypatch.setattr(drills, "drill", drill)
    for words in commands.values():
        monkeypatch.setattr("sys.argv", ["drills", *words[:-2]])
        assert drills.main() == 0
    assert made == list(commands) and reason in capsys.readouterr().out


def test_an_item_that_needs_a_server_is_left_out_without_one(monkeypatch):
    monkeypatch.setattr(two_gpus_parts.importlib.util, "find_spec", lambda name: None)
    items = dict(PARTS["http"].items(Options("cpu", True)))
    with pytest.raises(Unable, match="needs fastapi and uvicorn"):
        items["http ep1"]({}, 1.0)


def test_what_becomes_of_an_optional_backend_is_a_result(monkeypatch):
    said = iter([[{"deepep": None, "nccl_ep": "needs a newer NCCL"}], RuntimeError("rank 1 failed: no room")])

    def on_ranks(*_):
        value = next(said)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(two_gpus_parts, "on_ranks", on_ranks)
    done = {}
    for key, call in PARTS["backends"].items(Options("cuda", False)):
        done[key] = call(done, 60.0)
    assert (done["deepep"]["outcome"], done["deepep"]["reason"]) == ("failed", "rank 1 failed: no room")
    assert (done["nccl_ep"]["outcome"], done["nccl_ep"]["reason"]) == ("refused", "nccl_ep needs a newer NCCL")
    assert done["deepep"]["installed"]["sgl-deep-ep"] == "not installed"


def test_a_share_of_the_rounds_is_hidden_or_none():
    def row(step_ms: float, rounds_ms: float) -> list[dict]:
        return [{"step": "decode 1 @ 4096", "ms": step_ms, "rounds ms": rounds_ms}]

    rows = {"auto": row(7.0, 1.0), "allreduce": row(8.0, 2.0), "silent": row(6.5, 0.5)}
    found = silent_steps.hidden(rows)
    assert found == {
        "auto": {"1 @ 4096": {"hidden": 0.5, "net": 0.0}},
        "allreduce": {"1 @ 4096": {"hidden": 0.25, "net": 0.0}},
    }
    assert silent_steps.hidden({"auto": row(7.0, 1.0)}) == {}
    assert silent_steps.hidden({"auto": row(7.0, 0.4), "silent": row(6.5, 0.5)})["auto"]["1 @ 4096"]["net"] is None


def test_a_step_goes_through_what_was_asked_for():
    torch.set_num_threads(1)
    settings = {"model": str(TINY_CHECKPOINT), "overrides": {"num_hidden_layers": 2}, "points": "1@20", "replays": 1}
    made = two_gpus_steps.StepRank(ParallelState(), moe_comm="allreduce", **settings)
    used = {name: made.rows(name)[0] for name in ("allreduce", "reference", "silent", "auto")}
    made.close()
    assert {name: row["dispatcher"] for name, row in used.items()} == {
        "allreduce": "allreduce", "reference": "reference", "silent": "reference", "auto": "reference",
    }  # fmt: skip
    assert all(row["ms"] > 0 and row["rounds ms"] > 0 for row in used.values())


def test_a_draft_changes_no_token_of_an_engine_that_looks_at_no_clock():
    torch.set_num_threads(1)
    settings = {"model": str(TINY_CHECKPOINT), "device": "cpu", "moe_comm": "allreduce", "max_num_seqs": 2}
    settings |= {"kv_cache_memory_gb": 0.05, "max_num_batched_tokens": 64}
    modes = ["eager", "eager eagle3"]
    found = two_gpus_tokens.tokens_of_rank(ParallelState(), settings, modes, ["What is 17 + 25?", [5, 6, 7]], 8)
    plain, guessed = found.values()
    assert guessed["answer"] == plain["answer"] and [len(one["tokens"]) for one in plain["answer"]] == [8, 8]
    assert plain["accepted"] is None and guessed["accepted"] > 0


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
