"""Cliffs are named where a message four times as large costs eight times as much, and nowhere else."""

from engine.doctor.cliffs import GPU_CAUSES, GPU_REMEDIES, explain, find_cliffs

ROW = 14336


def curve(us: dict[int, float]) -> dict[int, float]:
    return {rows: value * 1e-6 for rows, value in us.items()}


def test_published_cliff_is_found_once():
    """45 us for one row, 344 for 57 kB."""
    found = find_cliffs("all-reduce", curve({1: 40, 2: 60, 4: 344, 8: 360, 16: 380, 32: 420}), ROW)
    assert [(cliff.small_bytes, cliff.large_bytes) for cliff in found] == [(ROW, 4 * ROW)]
    assert "14.3 kB takes 40 us and 57.3 kB takes 344 us: 4x the message at 8.6x the time" in found[0].sentence()
    assert "4 calls of 14.3 kB would take 160 us" in found[0].sentence()


def test_the_steepest_of_overlapping_ones_is_kept():
    found = find_cliffs("x", curve({1: 10, 2: 10, 4: 85, 8: 200}), ROW)
    assert [cliff.large_bytes for cliff in found] == [8 * ROW]


def test_two_cliffs_apart_are_two():
    found = find_cliffs("x", curve({1: 1, 4: 10, 16: 10, 64: 200}), ROW)
    assert [cliff.small_bytes for cliff in found] == [ROW, 16 * ROW]


def test_bandwidth_and_flat_curves_are_none():
    assert find_cliffs("x", curve({1: 10, 4: 40, 16: 160}), ROW) == []
    assert find_cliffs("x", curve({1: 10, 2: 90}), ROW) == []
    assert explain([], True)[0].startswith("No size cliff")


def test_causes_follow_the_cliffs():
    cliffs = find_cliffs("x", curve({1: 1, 4: 10}), ROW)
    assert explain(cliffs, True)[1:] == [GPU_CAUSES, GPU_REMEDIES]
    assert "no setting of GPUs" in explain(cliffs, False)[1]
