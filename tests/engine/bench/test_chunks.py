"""chunks from end to end on a small share: every point is measured, replayed where a graph fits."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from engine.bench import chunks, share
from engine.bench.__main__ import main, parser
from tests.rerun import record_segments
from tests.shares import config_directory

SHAPE = ["--tp-share", "2", "--device", "cpu", "--replays", "2", "--decode-context", "70"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(config_directory(tmp_path_factory.mktemp("share") / "model"))


def test_every_point_is_measured(tmp_path, model):
    file = tmp_path / "result.json"
    arguments = ["--tokens", "3,40", "--contexts", "0,64", "--decodes", "0,2"]
    assert main(["chunks", "--model", model, *SHAPE, *arguments, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    points = [(row["decodes"], row["context"], row["tokens"]) for row in result["rows"]]
    assert points == [(n, c, t) for n in (0, 2) for c in (0, 64) for t in (3, 40)]
    assert all(row["eager ms"] > 0 and row["ms"] is None for row in result["rows"]), "a CPU has no graphs"
    assert result["graph_bytes"] == {"decodes": 0, "rows": {}}


def test_a_replayed_chunk_is_timed_beside_the_one_at_once(model):
    config = share.share_config(parser().parse_args(["chunks", "--model", model, *SHAPE]), 1, max_num_batched_tokens=64)
    runner = share.build_runner(config, num_blocks=20, longest=256, max_num_seqs=4)
    recorder = record_segments(runner, [8])
    args = SimpleNamespace(decode_context=70, replays=2)
    row, larger = (chunks.measure_point(runner, count, 10, 2, args) for count in (6, 7))
    assert row["graph rows"] == 8 and row["ms"] > 0 and row["host ms"] > 0
    assert larger["graph rows"] is None and larger["eager ms"] > 0
    replays = {graph.num_replays for graph in recorder.graphs}
    assert len(replays) == 1 and replays.pop() > args.replays, "all pieces, as often as it was timed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--contexts", "0,x"], "--contexts"), (["--tokens", "0"], "--tokens"), (["--decode-context", "0"], "--decode-")],
)
def test_a_setting_that_cannot_be_measured_is_refused(capsys, model, arguments, words):
    assert main(["chunks", "--model", model, *SHAPE, *arguments]) == 2
    assert words in capsys.readouterr().err
