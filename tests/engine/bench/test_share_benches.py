"""step, moe and mla from end to end on a small share: what they report is what was asked for and adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.bench import gpu_timing, share
from engine.bench import step as step_bench
from engine.bench.__main__ import main, parser
from engine.bench.routing import counted_experts, fixed_routing, moe_layers
from tests.shares import config_directory

SHAPE = ["--tp-share", "2", "--device", "cpu", "--replays", "2"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Small denominators: what they are is not tested here."""
    monkeypatch.setitem(gpu_timing.READ_BYTES, "cpu", 10**6)
    monkeypatch.setitem(gpu_timing.MATMUL_SIZE, "cpu", 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(config_directory(tmp_path_factory.mktemp("share") / "model"))


def measured(tmp_path: Path, *arguments: str) -> dict:
    file = tmp_path / "result.json"
    assert main([*arguments, *SHAPE, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["command"].startswith(f"python -m engine.bench {arguments[0]}")
    assert result["date"] and result["device"] and result["versions"]["torch"] == torch.__version__
    assert result["read_bytes_per_second"] > 0 and result["goals"].startswith("G")
    assert result["settings"]["seed"] == 0
    return result


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("routing", ["model", "slowest"])
def test_step(tmp_path, model, ep, routing):
    points = ["--points", "1@64,16@100", "--prefill", "40", "--layers", "2"]
    result = measured(tmp_path, "step", "--model", model, *points, "--ep-share", str(ep), "--routing", routing)
    one, many, prefill = result["rows"]
    assert [row["step"] for row in result["rows"]] == ["decode 1 @ 64", "decode 16 @ 100", "prefill 40"]
    for row, batch in ((one, 1), (many, 16), (prefill, 40)):
        assert row["tok/s"] == pytest.approx(batch * 1e3 / row["ms"])
        assert row["fraction"] == pytest.approx(row["roofline ms"] / row["ms"])
        assert row["goal"] is None, "the goals are for the full model"
    assert one["roofline ms"] == pytest.approx(
        (one["weights GB"] + one["KV GB"]) * 1e12 / result["read_bytes_per_second"], rel=1e-6
    )
    assert many["KV GB"] == pytest.approx(1600 * 2 * (32 + 8) * 2 / 1e9)
    assert many["weights GB"] > one["weights GB"] and many["experts a layer"] > one["experts a layer"]
    assert result["world"] == {"tp": 2, "ep": ep} and result["layers"] == 2
    assert prefill["TFLOP"] > 0 and one["TFLOP"] is None
    counted = result["communication_a_step"]
    rounds = {"attention_reduce": 2, "moe_dispatch": 1, "moe_combine": 2, "moe_all_reduce": 0, "other": 2}
    assert counted["rounds"] == rounds and set(counted["bytes"].values()) == {0}


def test_moe(tmp_path, model):
    result = measured(tmp_path, "moe", "--model", model, "--tokens", "1,4")
    assert [(row["layout"], row["rows"]) for row in result["rows"]] == [
        (layout, rows) for layout in ("tp", "ep-mean", "ep-slowest") for rows in (1, 4)
    ]
    by_key = {(row["layout"], row["rows"]): row for row in result["rows"]}
    assert by_key["tp", 1]["experts hit"] == 2.0 and by_key["tp", 4]["pairs"] == 8.0
    for rows in (1, 4):
        assert by_key["ep-slowest", rows]["experts hit"] > by_key["ep-mean", rows]["experts hit"] > 0
    sliced = 3 * 64 * 64 / 2 * (0.5 + 2 / 32) / 1e6
    for (layout, _), row in by_key.items():
        assert row["MB"] == pytest.approx(row["experts hit"] * sliced * (1 if layout == "tp" else 2))
        assert row["GB/s"] == pytest.approx(row["MB"] / row["us"] * 1e3)
        assert row["timed"] == "cpu"


def test_dense(tmp_path, model):
    result = measured(tmp_path, "dense", "--model", model, "--tokens", "1,3")
    names = [row["product"] for row in result["rows"]]
    assert names[: len(names) // 2] * 2 == names and names[-1] == "layer" and "o" in names
    for rows in (1, 3):
        *each, layer = [row for row in result["rows"] if row["rows"] == rows]
        assert layer["us"] == pytest.approx(sum(row["us"] for row in each)) and layer["goal us"] is None
        assert layer["MB"] == pytest.approx(sum(row["MB"] for row in each))
        assert all(row["us"] > 0 and row["library us"] > 0 for row in each)


def test_mla(tmp_path, model):
    result = measured(tmp_path, "mla", "--model", model, "--points", "1@64,3@130", "--queries", "1,2")
    assert [(r["requests"], r["context"], r["queries"]) for r in result["rows"]] == [
        (1, 64, 1), (1, 64, 2), (3, 130, 1), (3, 130, 2),
    ]  # fmt: skip
    assert result["heads"] == 2
    for row in result["rows"]:
        assert row["KV MB"] == pytest.approx(row["requests"] * row["context"] * (32 + 8) * 2 / 1e6)
        assert row["fraction"] == pytest.approx(row["GB/s"] * 1e9 / result["read_bytes_per_second"])
    single, double = result["rows"][:2]
    assert double["over 1 query"] == pytest.approx(double["us"] / single["us"]) and single["over 1 query"] is None


def test_mla_over_rows_of_bytes(tmp_path, model):
    """Beside plain ones: fewer bytes, and how much faster that is."""
    points = ["--points", "1@64,3@130", "--queries", "1,2", "--kv-cache", "auto,fp8"]
    rows = measured(tmp_path, "mla", "--model", model, *points)["rows"]
    assert [row["cache"] for row in rows] == ["auto", "fp8"] * 4
    for plain, ours in zip(rows[::2], rows[1::2], strict=True):
        assert (plain["requests"], plain["queries"]) == (ours["requests"], ours["queries"])
        assert ours["KV MB"] == pytest.approx(ours["requests"] * ours["context"] * 64 / 1e6)
        assert ours["times as fast as auto"] == pytest.approx(plain["us"] / ours["us"])
        assert plain["times as fast as auto"] is None
    assert rows[3]["over 1 query"] == pytest.approx(rows[3]["us"] / rows[1]["us"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["step", "--points", "4"], "--points"),
        (["step", "--points", "0@64"], "--points"),
        (["step", "--prefill", "-1"], "--prefill"),
        (["step", "--ep-share", "3"], "ep_share=3"),
        (["step", "--replays", "0"], "--replays"),
        (["moe", "--tokens", "1,x"], "--tokens"),
        (["dense", "--tokens", "0"], "--tokens"),
        (["moe", "--layouts", "sideways"], "sideways"),
        (["mla", "--queries", "0"], "--queries"),
        (["mla", "--kv-cache", "auto,fp4"], "--kv-cache"),
    ],
)
def test_a_setting_that_cannot_be_measured_is_refused(capsys, model, arguments, words):
    command, *rest = arguments
    assert main([command, "--model", model, *SHAPE, *rest]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture(scope="module")
def runner(model):
    args = parser().parse_args(["step", "--model", model, *SHAPE])
    config = share.share_config(args, 2, max_num_batched_tokens=64)
    return share.build_runner(config, num_blocks=20, longest=256, max_num_seqs=4)


def test_a_decode_step_reads_its_whole_context(runner):
    """Other numbers in the oldest cached token change the result; so do those in no block of the request not."""
    with torch.inference_mode():
        step = step_bench.decode_step(runner, 2, 130)
        items = step.scheduled
        assert [(i.start, i.stop, i.samples) for i in items] == [(129, 130, True)] * 2
        used = [block for item in items for block in item.request.block_ids]
        assert len(set(used)) == 6 and 0 not in used and max(used) < runner.num_blocks

        def hidden():
            return runner.model(runner.input_batch.build(step, runner.dispatchers.for_rows(1)), runner.caches)

        before = hidden().clone()
        assert before.isfinite().all() and torch.equal(before, hidden())
        free = next(b for b in range(1, runner.num_blocks) if b not in used)
        runner.caches[:, free] += 1
        assert torch.equal(before, hidden())
        runner.caches[:, used[0], 0] += 1
        after = hidden()
        assert not torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_fixed_routing_is_what_the_experts_get_and_ends(runner):
    layers = moe_layers(runner.model)
    routers = [layer.router for layer in layers]
    call = step_bench.step_callable(runner, 4, 70)
    with fixed_routing(runner.model, "slowest", 4, 2, seed=5), counted_experts(runner.model) as experts:
        call()
    expected = [int((layer_ids < 4).sum()) for layer_ids in _drawn(runner, len(layers))]
    assert experts.pairs == expected and len(experts.distinct) == len(layers)
    assert [layer.router for layer in layers] == routers


def _drawn(runner, count):
    from engine.bench.routing import routings

    return routings("slowest", count, 4, runner.model_config.n_routed_experts, 2, 2, seed=5)
