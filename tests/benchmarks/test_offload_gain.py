"""What a host pool of KV blocks gains: the simulation counts as it should, and copies bring back what they took."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import offload_gain
from benchmarks.offload_copies import BlockCopier
from benchmarks.offload_trace import HostCosts, Session, TraceShape, Turn, make_sessions, replay

COSTS = HostCosts(compute=1e-3, restore=1e-4)


def two_that_take_turns(prefix: int = 128) -> list[Session]:
    """Each comes back after the other; contexts of 8 blocks, the first two in common."""
    turns = [Turn(320, 64, 0.0), Turn(64, 64, 100.0)]
    return [Session(name, 0, prefix, [Turn(t.new_tokens, t.answer_tokens, t.pause + 50 * name) for t in turns])
            for name in range(2)]  # fmt: skip


def test_a_pool_for_all_computes_every_token_once():
    found = replay(two_that_take_turns(), 100, 0, COSTS)
    assert found.prompt_tokens == 2 * (448 + 576)
    assert found.cached_tokens == 128 + 2 * 512 and found.again_tokens == found.restored_tokens == 0
    assert found.ttft == pytest.approx([0.448, 0.320, 0.064, 0.064])


def test_what_was_evicted_is_computed_again_or_brought_back():
    """12 blocks: the second session's 8 push out all of the first one's own but what lies first."""
    alone = replay(two_that_take_turns(), 12, 0, COSTS)
    assert alone.again_tokens > 0 and alone.restored_tokens == 0
    helped = replay(two_that_take_turns(), 12, 100, COSTS)
    assert helped.again_tokens == 0
    assert helped.restored_tokens == alone.again_tokens, "all of it"
    assert helped.cached_tokens == alone.cached_tokens
    assert sum(alone.ttft) - sum(helped.ttft) == pytest.approx(alone.again_tokens * (1e-3 - 1e-4))


def test_a_host_pool_too_small_helps_in_part():
    parts = [replay(two_that_take_turns(), 12, blocks, COSTS).again_tokens for blocks in (0, 2, 100)]
    assert parts[0] >= parts[1] >= parts[2] == 0


def test_a_context_beyond_the_pool_is_refused():
    with pytest.raises(ValueError, match="does not fit a pool of 7 blocks"):
        replay(two_that_take_turns(), 7, 0, COSTS)


def test_sessions_are_their_seeds_and_grow_as_agents_do():
    shape = TraceShape(40, 20, seed=1)
    sessions = make_sessions(shape)
    assert sessions == make_sessions(shape) != make_sessions(TraceShape(40, 20, seed=2))
    ends = [s.prefix_tokens + sum(t.new_tokens + t.answer_tokens for t in s.turns) for s in sessions]
    assert min(ends) > 28_000 and max(ends) < 125_000
    assert len({s.prefix for s in sessions}) == 3 and all(t.new_tokens > 0 for s in sessions for t in s.turns)


@pytest.mark.parametrize("way", ["strided", "gathered"])
def test_copies_bring_back_what_they_took(way):
    cache = torch.randn(3, 9, 4, 5)
    before, blocks = cache.clone(), [7, 2, 5]
    copier = BlockCopier(cache, 3)
    getattr(copier, f"{way}_to_host")(blocks)
    cache[:, blocks] = 0
    getattr(copier, f"{way}_to_device")(blocks)
    assert torch.equal(cache, before)


def test_the_script_says_what_a_trace_gains(tmp_path, capsys):
    file = tmp_path / "offload.json"
    small = ["--sessions", "6", "--turns", "4", "--pool-tokens", "150000", "400000", "--host-gb", "64"]
    copies = ["--device", "cpu", "--layers", "1", "--copy-blocks", "1", "2", "--repeats", "2"]
    assert offload_gain.main([*small, *copies, "--engine-tokens", "140000", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [(row["pool tokens"], row["host GiB"]) for row in result["rows"]] == [
        (150000, 0), (150000, 64), (400000, 0), (400000, 64),
    ]  # fmt: skip
    assert all(0 <= row["cached"] + row["restored"] + row["computed again"] <= 1 for row in result["rows"])
    assert result["rows"][0]["saved"] == 0 and result["rows"][1]["computed again"] == 0
    assert len(result["copies"]) == 8 and all(row["GB/s"] > 0 for row in result["copies"])
    assert result["verdict"].startswith("Verdict: offload") and "150000 tokens" in result["verdict"]
    assert result["verdict"] in capsys.readouterr().out
