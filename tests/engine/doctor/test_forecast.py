"""The step model against machines whose outcome is known."""

import pytest

from engine.doctor.forecast import ACCEPT_LENGTHS, DRAFTS, PAYS, Efficiency, accepted, anchored, forecast
from engine.doctor.placement import Placement
from tests.engine.doctor.machines import FULL, TP8, machine


@pytest.mark.parametrize("small_us", [29, 69])
@pytest.mark.parametrize("large_us", [200, 250, 300])
def test_founding_host_loses_by_speculation(small_us, large_us):
    """82 tokens/s plain; a round of 56 kB at 200 to 300 us; drafts kept 2.25 to 2.5 tokens a step. 82 tokens/s leave a
    round of 16 kB at most 69 us, and 29 at the efficiency that other kernels reach there."""
    host = anchored(machine({1: small_us, 4: large_us}), TP8, 82)
    result = forecast(TP8, host)
    assert result.plain_rate == pytest.approx(82)
    assert all(result.rate(3, length) < result.plain_rate for length in (2.0, 2.25, 2.5))
    assert result.best(2.0)[1] < PAYS


def test_founding_host_reproduces_what_was_measured_there():
    """54 tokens/s with drafts that kept 2.25 to 2.5 tokens, at the upper end of what a round cost."""
    result = forecast(TP8, anchored(machine({1: 69, 4: 300}), TP8, 82))
    assert result.rate(3, 2.5) == pytest.approx(54, rel=0.1)
    assert "does not pay" in result.verdict() and "mend the links" in result.verdict()


def test_tuned_pcie_host_gains():
    """The same GPUs with 24.5 us at 56 kB: published 19 to 21 ms an iteration and 1.3x to 1.5x."""
    result = forecast(TP8, machine({1: 19.8, 4: 24.5}))
    assert 10.3e-3 < result.plain.seconds < 11.9e-3
    assert 19e-3 < result.iteration(3) < 21e-3
    assert 1.3 < result.rate(3, 2.5) / result.plain_rate < 1.5
    assert result.verdict().startswith("Speculation pays on this machine:")


def test_verdict_between_names_the_accept_length():
    result = forecast(TP8, machine({1: 20, 4: 150}))
    even = result.break_even()
    assert 2.0 < even < 3.0 and f"from an accept length of {even:.2f}" in result.verdict()
    assert result.best(even + 0.05)[1] > 1 > result.best(even - 0.05)[1]


def test_ranks_without_rounds_and_bytes_that_grow():
    """A gain is bounded by the bytes of a verify: 1.68x those of a step for four rows."""
    result = forecast(TP8, machine({1: 1e-6, 512: 1e-6}, efficiency=1.0))
    assert result.verify[3].seconds / result.plain.seconds == pytest.approx(1.68, rel=0.01)
    assert result.rate(3, 3.0) / result.plain_rate == pytest.approx(1.58, rel=0.01)


def test_rounds_of_drafts():
    """Four a guess, of one row, and one of all rows that were verified."""
    result = forecast(TP8, machine({1: 10, 4: 40}))
    assert result.draft[3].comm == pytest.approx(3 * 4 * 10e-6 + 40e-6)


def test_fewer_drafts_keep_fewer_tokens():
    for length in ACCEPT_LENGTHS:
        kept = [accepted(length, k) for k in DRAFTS]
        assert kept == sorted(kept) and kept[-1] == length
        p = kept[0] - 1
        assert 1 + p + p**2 + p**3 == pytest.approx(length, abs=1e-6)


def test_expert_parallel_reads_more_for_few_rows():
    many = {rows: Placement(FULL, 8, 8).bytes_read(rows, 0) / 1e9 for rows in (1, 4)}
    assert many == {1: pytest.approx(8.35, rel=0.01), 4: pytest.approx(14.51, rel=0.01)}
    assert TP8.bytes_read(1, 4096) / 1e9 == pytest.approx(6.03 + 0.29, rel=0.01)


def test_rate_that_rounds_alone_exceed_is_refused():
    with pytest.raises(ValueError, match=r"leave 10 ms a token, but the rounds of a step were measured at 12\.2 ms"):
        anchored(machine({1: 100}), TP8, 100)


def test_efficiency_lies_between_measured_rows():
    assert Efficiency({1: 0.2, 5: 0.4}, "").at(3) == pytest.approx(0.3)
    assert Efficiency({1: 0.2, 5: 0.4}, "").at(64) == 0.4
