"""From outcomes of probes to tables, winners and advice, without ranks."""

import json
from pathlib import Path

import pytest

from engine.doctor.diagnosis import diagnose
from engine.doctor.findings import H200_EFFICIENCY, findings
from engine.doctor.links import Links, Pair
from engine.doctor.placement import Placement, placements
from engine.doctor.settings import Settings
from engine.doctor.settle import better_setting, sentences
from engine.doctor.simulate import COLLECTIVE_HOPS
from engine.doctor.team import Outcome
from tests.engine.doctor.machines import FULL

ROWS = (1, 4, 16)
ROW_BYTES = 14336


def rounds(reduce: float, dispatch: float, combine: float, sent: int) -> dict:
    verbs = {"reduce": (reduce, sent), "dispatch": (dispatch, sent if dispatch else 0), "combine": (combine, sent)}
    return {verb: {"seconds": us * 1e-6, "sent": num} for verb, (us, num) in verbs.items()}


def outcomes(all_reduce_us: dict[int, float], one_shot_us: dict[int, float] | None = None) -> dict[str, Outcome]:
    """Eight GPUs whose all-reduce takes so long, and perhaps a one-shot exchange; nccl_a2a is refused."""
    curve = {str(t): us * 1e-6 for t, us in all_reduce_us.items()}
    layer = {str(t): rounds(us, 0, us, t * ROW_BYTES) for t, us in all_reduce_us.items()}
    found = {
        "first all-reduce": Outcome({"sum": [8, 8]}),
        "read rate": Outcome({"bytes_per_second": [1.6e12] * 7 + [1.5e12]}),
        "obstacles": Outcome({"allreduce": None, "nccl_a2a": "wants a GPU of another kind"}),
        **{f"collective:{name}": Outcome(curve) for name in COLLECTIVE_HOPS},
        "dispatcher:allreduce": Outcome(layer),
        "dispatcher:nccl_a2a": Outcome(failed="rank 0: ValueError: moe_comm='nccl_a2a' wants"),
    }
    if one_shot_us:
        layer = {str(t): rounds(us, 0, us, 7 * t * ROW_BYTES) for t, us in one_shot_us.items()}
        found["dispatcher:symm_replicated"] = Outcome(layer)
    return found


def diagnosis(found: dict[str, Outcome], ep: int = 1, links: Links | None = None, **options):
    settings = Settings(8, ep, "cuda", rows=ROWS)
    return diagnose(settings, links or Links(), findings(found), found, **options)


def test_efficiency_is_what_was_measured():
    rows = json.loads((Path(__file__).parents[3] / "benchmarks/step_tp8_h200.json").read_text())["rows"]
    measured = {int(row["step"].split()[1]): row["fraction"] for row in rows if row["step"].startswith("decode")}
    assert H200_EFFICIENCY.by_rows == {t: pytest.approx(f, abs=5e-4) for t, f in measured.items()}


def test_host_with_a_cliff_is_told_so():
    result = diagnosis(outcomes({1: 29, 4: 250, 16: 300}))
    text = result.text()
    assert "all-reduce: 14.3 kB takes 29 us and 57.3 kB takes 250 us" in text and "ForceP2P" in text
    assert "1. Mend the cliff" in text
    assert result.data["forecast"]["verdict"].startswith("Speculation does not pay on this machine")


def test_tuned_host_is_told_to_speculate():
    result = diagnosis(outcomes({1: 19.8, 4: 24.5, 16: 30}))
    assert "No size cliff" in result.text()
    assert result.data["forecast"]["verdict"].startswith("Speculation pays on this machine:")


def test_measured_plain_rate_replaces_the_efficiency():
    result = diagnosis(outcomes({1: 69, 4: 300, 16: 400}), plain_rate=82.0)
    assert result.data["forecast"]["plain_tokens_per_second"] == pytest.approx(82)
    assert "from 82 tokens/s plain, as given" in result.text()


def test_winner_changes_with_rows_and_is_shown():
    result = diagnosis(outcomes({1: 20, 4: 22, 16: 30}, {1: 8, 4: 20, 16: 90}))
    assert result.data["fastest"] == {1: "symm_replicated", 4: "symm_replicated", 16: "allreduce"}
    assert "symm_replicated for T=1 to 4, allreduce for T=16" in result.text()
    assert "nccl_a2a: no figure: wants a GPU of another kind." in result.text()


def test_steps_of_each_placement():
    result = diagnosis(outcomes({1: 20, 4: 24, 16: 30}), ep=8)
    steps = {(row["experts"], row["T"]): row for row in result.data["steps"]}
    assert {name for name, _ in steps} == {"TP8", "EP2 x TP4", "EP8"}
    assert steps["TP8", 1]["rounds"] == 122 and steps["TP8", 1]["sent MB"] == pytest.approx(122 * ROW_BYTES / 1e6)
    assert steps["TP8", 1]["rounds us"] == pytest.approx(122 * 20)
    assert steps["EP8", 1]["expert bytes"] == pytest.approx(2.56, rel=0.02)
    assert steps["EP8", 1]["step ms"] > steps["EP2 x TP4", 1]["step ms"] > steps["TP8", 1]["step ms"]


def test_placements_follow_divisors():
    assert [p.name for p in placements(FULL, 8)] == ["TP8", "EP2 x TP4", "EP8"]
    assert [p.name for p in placements(FULL, 2)] == ["TP2", "EP2"]
    assert [p.name for p in placements(FULL, 1)] == ["TP1"]
    assert [p.name for p in placements(FULL, 5)] == ["TP5"]  # 384 experts do not divide by 5


def test_dispatch_that_carries_bytes_is_a_round():
    found = findings(outcomes({1: 20}) | {"dispatcher:allreduce": Outcome({"1": rounds(1, 1, 1, 9)})})
    assert Placement(FULL, 8, 8).num_rounds(found.dispatchers["allreduce"][1]) == 61 + 60 + 61


def test_warning_about_links_comes_first():
    links = Links(pairs=[Pair(0, 1, peer=True, bytes_per_second=12e9, small_seconds=240e-6)])
    text = diagnosis(outcomes({1: 240, 4: 242}), links=links).text()
    assert "1. Mend the links first: GPU 0 -> GPU 1: peer access is on, but a copy of 16 kB takes 240.0 us" in text
    assert "The fastest sum of one row takes 240 us" in text


def test_nothing_measured_says_why():
    silent = {"first all-reduce": Outcome(failed="rank 3: was killed by signal 9"), "obstacles": Outcome(failed="no")}
    assert (
        "rank 3: was killed by signal 9" in findings(silent).failed and "NCCL_P2P_DISABLE=1" in findings(silent).failed
    )


def test_settled_settings_are_told_by_size():
    def nccl(setting, us=None, failed=None):
        value = None if us is None else {str(t): v * 1e-6 for t, v in zip(ROWS, us, strict=True)}
        return {f"NCCL_ALGO={setting[0]} NCCL_PROTO={setting[1]}: collective:all-reduce": Outcome(value, failed)}

    tried = nccl(("Ring", "LL"), (10, 20, 90)) | nccl(("Ring", "Simple"), (30, 30, 30))
    tried |= nccl(("Tree", "LL"), failed="all ranks were in it and none finished within 10 s")
    symmetric = {"one-shot": {"1": 1, "4": 2, "16": 3}, "two-shot": {"1": 1, "4": 2, "16": 3}}
    tried["X=1: symmetric memory"] = Outcome(symmetric | {"pushes": {"alone": 50e9, "all at once": 5e9}})
    said = " ".join(sentences(tried, ROWS))
    assert "NCCL Ring LL is fastest at T=1 to 4" in said and "NCCL Ring Simple is fastest at T=16" in said
    assert "Set NCCL_ALGO=Ring NCCL_PROTO=LL: all-reduces of up to 4 rows take 0.50 of the time" in (
        better_setting(tried, ROWS, {1: 20e-6, 4: 40e-6, 16: 1e-6}) or ""
    )
    assert better_setting(tried, ROWS, {1: 11e-6, 4: 20e-6}) is None and better_setting({}, ROWS, {1: 1.0}) is None
    assert "Do not use here: NCCL Tree LL." in said and "one-shot exchanges contend" in said


def test_plot_draws_every_dispatcher(tmp_path):
    pytest.importorskip("matplotlib")
    from engine.doctor import plot

    found = findings(outcomes({1: 20, 4: 22, 16: 30}, {1: 8, 4: 20, 16: 90}))
    plot.check(str(tmp_path / "a.png"))
    plot.draw(str(tmp_path / "a.png"), found, Placement(FULL, 8, 8), "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
