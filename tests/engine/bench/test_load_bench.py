import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from engine.bench import load
from engine.bench.__main__ import main
from engine.bench.load_arms import CHUNK_BYTES, RankLoad, pieces_of
from engine.bench.load_memory import MemoryTrace
from engine.bench.report import MeasurementError
from engine.config import ConfigError, EngineConfig
from engine.loading import page_cache
from engine.loading.extent_reader import ALIGNMENT, MOST_SKIPPED, Extent
from models.kimi_k25.synthetic import Plan, write
from tests.processes import until

SIZES = {
    "num_hidden_layers": 2, "n_routed_experts": 4, "hidden_size": 256, "intermediate_size": 256, "q_lora_rank": 64,
    "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_attention_heads": 4,
    "moe_intermediate_size": 128, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("load") / "made-up"
    write(Plan.of(SIZES, {"vt_num_hidden_layers": 0}, num_files=3), directory)
    return directory


def test_two_ranks_run_every_arm_and_the_report_says_all(checkpoint, tmp_path, capsys):
    file = tmp_path / "load.json"
    options = ["--ranks", "2", "--rounds", "1", "--device", "cpu", "--no-drop-cache", "--json", str(file)]
    prepared = tmp_path / "prepared"
    assert main(["load", "--model", str(checkpoint), "--prepared-weights", str(prepared), *options]) == 0
    found = json.loads(file.read_text())
    rows = {row["arm"]: row for row in found["rows"]}
    assert rows.keys() - {"disk O_DIRECT"} == {"disk", "load", "prepared", "safe_open"}
    disk = min(row["seconds"] for arm, row in rows.items() if arm.startswith("disk"))
    for row in rows.values():
        assert row["of disk"] == pytest.approx(disk / row["seconds"])
        assert row["s beyond disk"] == pytest.approx(row["seconds"] - disk)
        assert row["x safe_open"] == pytest.approx(rows["safe_open"]["seconds"] / row["seconds"])
        assert row["GB/s"] == pytest.approx(found["bytes"]["union"] / row["seconds"] / 1e9)
    for sample in (one for results in found["rounds"].values() for one in results[0]["ranks"]):
        assert 2 <= len(sample["trace"]) <= 20 and sample["trace"][0][0] <= sample["trace"][-1][0]
    both = zip(found["rounds"]["load"][0]["ranks"], found["rounds"]["safe_open"][0]["ranks"], strict=True)
    for rank, (ours, loop) in enumerate(both):
        assert ours["num_bytes"] == loop["num_bytes"] == found["bytes"]["ranks"][rank]
        assert ours["parts"].keys() == {"index", "build", "read"} and ours["weights"] > loop["weights"] > 0
    for rank, sample in enumerate(found["rounds"]["prepared"][0]["ranks"]):
        size = (prepared / f"rank-{rank}-of-2-ep-2.prepared").stat().st_size
        assert size - 2**20 < sample["num_bytes"] == sample["weights"] < size
        assert sample["parts"].keys() == {"index", "build", "read"}
    assert sum(found["bytes"]["ranks"]) > found["bytes"]["union"] / 2
    assert "round 1 of 1: load" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arms", "disk,tape"], "'tape'"),
        (["--arms", "load,prepared"], "--prepared-weights DIR"),
        (["--ranks", "0"], "at least 1"),
        (["--ranks", "2", "--tp-share", "8"], "leave --ranks 2 out"),
        (["--ep-share", "2"], "needs --tp-share"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(checkpoint, capsys, options, message):
    assert main(["load", "--model", str(checkpoint), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_an_arm_that_finds_no_prepared_weights_is_refused(checkpoint, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    config = EngineConfig(str(checkpoint), device="cpu", prepared_weights=tmp_path / "file").resolve(0)
    with pytest.raises(ConfigError, match="not there or not used"):
        RankLoad.of(config, 0).run("prepared", [])
    assert "was not written" in caplog.text


def test_a_rank_that_cannot_load_says_why(checkpoint, capsys):
    assert main(["load", "--model", str(checkpoint), "--tp-share", "3", "--device", "cpu"]) == 2
    assert "3" in capsys.readouterr().err


def is_in_memory(path: Path) -> bool:
    """Whether the file system of `path` has no disk, so that nothing can be dropped."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((len(place), kind) for place, kind in mounts if path.is_relative_to(place))[1] in ("tmpfs", "ramfs")


def test_a_dropped_file_is_cached_no_more_and_a_read_one_is(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(os.urandom(ALIGNMENT * 64 + 1))
    page_cache.drop([file])
    cold = page_cache.cached_share([file])
    assert cold in (None, 0.0) or is_in_memory(tmp_path)
    file.read_bytes()
    assert page_cache.cached_share([file]) in (None, 1.0)
    with open(file, "rb") as stream:
        assert page_cache.cached_pages(stream.fileno(), ALIGNMENT, 3 * ALIGNMENT) in (None, 3)
        assert page_cache.cached_pages(stream.fileno(), 0, 0) == 0


@pytest.mark.parametrize(("cached", "is_refused"), [(0.0, False), (0.009, False), (None, False), (0.02, True)])
def test_an_arm_that_would_begin_warm_is_refused(tmp_path, monkeypatch, cached, is_refused):
    file, dropped = tmp_path / "data", []
    monkeypatch.setattr(page_cache, "drop", dropped.extend)
    monkeypatch.setattr(page_cache, "cached_share", lambda files: cached)
    with pytest.raises(MeasurementError, match="2% of the files stay cached") if is_refused else nullcontext():
        assert load._make_cold([file], drops=True) == cached
    assert dropped == [file]
    assert load._make_cold([file], drops=False) == cached and dropped == [file]


def test_the_pieces_of_the_disk_arm_are_the_union_once(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    far = 3 * CHUNK_BYTES + MOST_SKIPPED + 2 * ALIGNMENT
    extents = [Extent(two, 10, 100), Extent(one, 5, 3 * CHUNK_BYTES), Extent(one, 100, 50), Extent(one, far, 1)]
    shares = pieces_of([*extents, *extents], 2)
    pieces = [piece for share in shares for piece in share]
    assert len(shares) == 2 and all(shares)
    assert all(piece.offset % ALIGNMENT == piece.size % ALIGNMENT == 0 < piece.size <= CHUNK_BYTES for piece in pieces)
    for extent in extents:
        places = range(extent.offset, extent.stop, ALIGNMENT)
        assert all(sum(p.file == extent.file and p.offset <= at < p.stop for p in pieces) == 1 for at in places)
    assert sum(piece.size for piece in pieces) <= 3 * CHUNK_BYTES + 4 * ALIGNMENT


def test_a_trace_sees_what_is_held_in_between():
    with MemoryTrace(on_gpu=False) as memory:
        held, before = bytearray(b"1") * 2**26, len(memory._points)
        until(lambda: len(memory._points) > before, 30, "it has looked once more")
        del held
    assert memory.host_peak > 2**25 and memory.gpu_peak == memory.pinned_peak == 0
    assert memory.points[-1][1] < memory.host_peak
