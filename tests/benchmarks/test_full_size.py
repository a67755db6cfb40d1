"""The script for the full model on eight GPUs: what fits, what items share, what is left where a rank dies."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import full_size, full_size_http
from benchmarks.full_size_parts import gains, parts_of
from benchmarks.full_size_rank import FullSizeRank, microseconds_a_step
from benchmarks.full_size_shape import Options, engine_settings, memory_of_rank, shape_of
from benchmarks.parts import Unable
from benchmarks.rank_team import RankTeam
from engine.comm.parallel_state import ParallelState
from engine.comm.timing import RoundTimes

H200 = 139.8
DRY = ("--device", "cpu", "--dry-run", "--tp", "2")


def run(directory, *arguments):
    code = full_size.main([*arguments, *DRY, "--out", str(directory)])
    return code, {file.stem: json.loads(file.read_text()) for file in directory.glob("*.json")}


def test_every_ep_and_dispatcher_has_a_part_that_ends_in_time(capsys):
    assert full_size.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    for ep in (8, 2, 1):
        assert f"ep{ep}_replicated" in text and f"ep{ep}_sharded" in text
    for name in ("allreduce", "nccl_a2a", "symm_replicated", "symm_scatter", "symm_sharded", "auto"):
        assert sum(name in line for line in lines) == 3
    assert all(0 < part.seconds < 540 for part in parts_of(8).values())
    assert list(parts_of(4))[1] == "ep4_replicated"


def test_too_few_gpus_are_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert full_size.main(["--all", "--out", str(tmp_path)]) == 2
    assert "--tp 8 needs 8 GPUs, this host has 4" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tp", "experts", "dispatcher", "fits"),
    [(8, None, "allreduce", True), (8, None, "nccl_a2a", True), (4, None, "allreduce", False), (4, 192, "auto", True)],
)
def test_a_rank_is_weighed_with_its_cache(tp, experts, dispatcher, fits):
    options = Options("cuda", False, tp, experts, H200)
    settings = engine_settings(options, tp, dispatcher, with_draft=True)
    if fits:
        assert "524288 tokens" in memory_of_rank(options, settings, 128, 4096)["verdict"]
        return
    with pytest.raises(
        Unable, match=r"^the model does not fit: 4 ranks of 139.80 GiB: .* --experts makes it smaller\.$"
    ):
        memory_of_rank(options, settings, 128, 4096)


def test_what_does_not_fit_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(RankTeam, "call", lambda *_: pytest.fail("ranks were started"))
    code, files = run(tmp_path, "--parts", "ep2_replicated,http", "--gpu-memory-gb", "0.01")
    assert code == 0
    for part in ("ep2_replicated", "http"):
        assert all("its part of the host's memory is 0.01" in item["skipped"] for item in files[part]["items"].values())


class _Team:
    """In place of ranks: notes what it is told, and dies of one dispatcher as long as `fails`."""

    def __init__(self, fails):
        self.fails, self.made, self.calls, self.closed, self.seconds = fails, [], [], 0, []

    def make(self, maker, settings, tp, ep, device):
        self.made.append((tp, ep, settings["settings"]["moe_comm"]))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed += 1

    def call(self, method, settings, seconds):
        self.calls.append((method, settings.get("dispatcher")))
        self.seconds.append(seconds)
        if self.fails and self.fails == settings.get("dispatcher"):
            raise RuntimeError("rank 1 ended (-9)")
        row = {"ms": 2.0}
        return [row, {"ms": 3.0}] if method == "prefill" else [[row], [{"ms": 3.0}]]


def test_a_dispatcher_that_dies_keeps_no_other_from_running_and_is_alone_tried_again(tmp_path, monkeypatch):
    team = _Team("symm_replicated")
    monkeypatch.setattr("benchmarks.full_size_parts.RankTeam", team.make)
    code, files = run(tmp_path, "--parts", "ep2_replicated")
    items = files["ep2_replicated"]["items"]
    assert all(seconds < 0.7 * 510 for seconds in team.seconds)  # a hang does not take all of the part's time
    assert code == 1 and items["symm_replicated"]["error"] == "RuntimeError: rank 1 ended (-9)"
    names = ["allreduce", "symm_replicated", "symm_scatter", "auto"]
    assert team.calls == [*(("steps", name) for name in names), ("prefill", None)]
    assert items["auto"]["rows"] == [{"ms": 3.0, "ms of ranks": [2.0, 3.0]}]
    assert set(team.made) == {(2, 2, "allreduce")} and team.closed == len(team.made)
    team.fails = None
    code, files = run(tmp_path, "--parts", "ep2_replicated")
    assert code == 0 and team.calls[5:] == [("steps", "symm_replicated")]


def test_a_part_without_time_closes_what_its_items_share(tmp_path, monkeypatch):
    team = _Team(None)
    monkeypatch.setattr("benchmarks.full_size_parts.RankTeam", team.make)
    code, _ = run(tmp_path, "--parts", "ep1_sharded", "--seconds", "1")
    assert code == 1 and team.calls == [] and team.closed == len(team.made) > 0


def test_gains_come_from_the_costs_of_steps():
    rows = [
        {"guesses": name, "ms": ms} for name, ms in (("no draft", 10.0), (0, 11.0), (1, 12.0), (2, 40.0), (3, 18.0))
    ]
    found = gains(rows)
    assert found["3.0"] == {"guesses": 3, "speedup": pytest.approx(3.0 * 10 / 18)}
    assert found["2.0"]["guesses"] == 1 and found["2.0"]["speedup"] == pytest.approx(1.5437 * 10 / 12, abs=1e-3)
    assert gains(rows[:2]) == {}


def test_rounds_of_a_step_are_those_of_its_layers():
    class Config:
        num_hidden_layers, first_k_dense_replace = 5, 1

    found = microseconds_a_step(RoundTimes(1e-6, 2e-6, 4e-6), Config)
    assert found["comm us by verb"] == pytest.approx({"reduce": 5.0, "dispatch": 8.0, "combine": 20.0})
    assert found["comm us"] == pytest.approx(33.0)


def test_a_rank_measures_steps_prefill_and_guesses_with_one_engine():
    options = Options("cpu", True, 1)
    settings = engine_settings(options, 1, "allreduce", with_draft=True)
    rank = FullSizeRank(ParallelState(), settings, most=2, context=16, longest=64, chunk=32)
    model = rank.runner.model
    rows = rank.steps("allreduce", [1, 2], 16, 1) + rank.steps("auto", [2], 16, 1)
    assert [(row["step"], row["rows"]) for row in rows] == [
        ("decode 1 @ 16", 1),
        ("decode 2 @ 16", 2),
        ("decode 2 @ 16", 2),
    ]
    assert all(row["ms"] > 0 and row["comm us"] > 0 for row in rows)
    assert rank.prefill(32, 1)["step"] == "prefill 32"
    assert [row["guesses"] for row in rank.costs(1, 16, 1)] == ["no draft", 0, 1, 2, 3]
    assert rank.runner.model is model
    rank.close()


def test_the_server_is_started_over_all_ranks_with_made_up_weights():
    command = full_size_http.command_of(Options("cuda", False, 8, 192), 8123)
    pairs = dict(zip(command[2::2], command[3::2], strict=True))
    assert (pairs["--tp"], pairs["--ep"], pairs["--load-format"], pairs["--port"]) == ("8", "8", "dummy", "8123")
    assert json.loads(pairs["--hf-overrides"]) == {"n_routed_experts": 192}
    shape = shape_of(Options("cuda", False, 8))
    assert int(pairs["--max-model-len"]) > shape.prompt_tokens + shape.output_tokens


@pytest.mark.parametrize(
    ("script", "seconds", "said"),
    [
        ("print('no such model'); raise SystemExit(3)", 60, "ended with exit code 3 while it started:\nno such model"),
        ("import time; time.sleep(60)", 0.5, "ended, out of time, with exit code -9 while it started"),
    ],
)
def test_a_server_that_does_not_start_says_why(monkeypatch, script, seconds, said):
    monkeypatch.setattr(full_size_http, "command_of", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(RuntimeError, match=said):
        full_size_http.run(Options("cpu", True, 2), seconds)


@pytest.mark.slow
def test_the_whole_script_on_two_ranks(tmp_path):
    code, files = run(tmp_path, "--all")
    assert code == 0 and set(files) == set(parts_of(2)), {name: file["items"] for name, file in files.items()}
    assert full_size.main(["--tables", *DRY, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "full_size.json").read_text())
    assert len(found["steps"]) == 2 * 6 * 6 and len(found["eagle3"]) == 3 and found["not run"] == {}
