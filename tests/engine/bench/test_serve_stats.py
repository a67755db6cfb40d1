"""The figures of a log written by hand."""

from __future__ import annotations

import pytest

from engine.bench.serve_stats import Limits, Record, decode_rate, percentile, summarise_load


def record(sent: float, times: list[float], num_output: int | None = None, **more) -> Record:
    return Record(sent, times, times[-1] if times else sent, 10, num_output or len(times), **more)


LOG = [
    record(0.0, [1.0, 1.1, 1.2, 1.3], num_cached=5),
    record(0.5, [1.0, 1.2, 1.4], num_output=6),
    record(1.0, [], status=429),
    record(1.0, [], status=503),
    record(1.0, [], status=0),
]


def test_percentiles_lie_between_their_neighbours():
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and percentile([1.0, 2.0], 75) == 1.75
    assert percentile([4.0], 99) == 4.0 and percentile([0.0, 1.0], 100) == 1.0
    with pytest.raises(ValueError, match="needs values"):
        percentile([], 50)


def test_a_log_by_hand():
    figures = summarise_load(LOG, Limits(ttft=0.6, itl=0.25))
    assert figures["requests"] == 5 and figures["output_tokens"] == 10
    assert figures["seconds"] == pytest.approx(1.4)
    assert figures["tok/s"] == pytest.approx(10 / 1.4) and figures["req/s"] == pytest.approx(2 / 1.4)
    assert figures["TTFT p50"] == pytest.approx(750) and figures["TTFT p99"] == pytest.approx(995)
    assert figures["ITL p50"] == pytest.approx(100) and figures["ITL p99"] == pytest.approx(200)
    assert figures["E2E p50 s"] == pytest.approx((1.3 + 0.9) / 2)
    assert figures["cached"] == pytest.approx(5 / 20) and figures["cached_tokens"] == 5
    assert (figures["429"], figures["errors"], figures["errors_by_status"]) == (1, 2, {"0": 1, "503": 1})


@pytest.mark.parametrize(
    ("limits", "good"), [((0.6, 0.25), 1), ((2.0, 0.25), 2), ((2.0, 0.15), 1), ((2.0, 0.05), 0), ((0.1, 9.0), 0)]
)
def test_good_requests_meet_both_limits(limits, good):
    figures = summarise_load(LOG, Limits(*limits))
    assert figures["good"] == pytest.approx(good / 5) and figures["good/s"] == pytest.approx(good / 1.4)


def test_the_rate_while_all_decode():
    # From 1.0 until 1.3: three events of one token, one event of two.
    assert decode_rate(LOG[:2]) == pytest.approx(5 / 0.3)
    assert decode_rate([record(0.0, [1.0, 2.0]), record(0.0, [3.0, 4.0])]) is None
    assert decode_rate([]) is None


def test_nothing_answered_has_no_times():
    figures = summarise_load(LOG[2:3], Limits(1.0, 1.0))
    assert figures["TTFT p50"] is None and figures["ITL p99"] is None and figures["cached"] is None
    assert figures["429"] == 1 and figures["good"] == 0.0
