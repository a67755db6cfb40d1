"""What became of the requests of a load, in the figures that users of a server know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

OK, REFUSED = 200, 429


@dataclass
class Record:
    """One request; times are seconds of one monotonic clock of the host.

    sent: when it was handed over. times: when each event with tokens arrived, tokens of one step each. status: HTTP's,
    200 in process, 0 where the connection broke.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    finished: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    status: int = OK

    @property
    def ok(self) -> bool:
        return self.status == OK and bool(self.times)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event and the next: what a reader waits for."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Limits:
    """Seconds within which a good request has its first token, and in which 99 % of its later events come."""

    ttft: float
    itl: float

    def met_by(self, record: Record) -> bool:
        return record.ok and record.ttft <= self.ttft and percentile(record.gaps or [0.0], 99) <= self.itl


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two values nearest. Raises ValueError for no values."""
    if not values:
        raise ValueError("a percentile needs values.")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def decode_rate(records: Sequence[Record]) -> float | None:
    """Tokens a second from the moment the last of the requests has begun until the first has ended; None where that
    never was: they did not all decode at once. An event counts its request's mean tokens an event."""
    good = [record for record in records if record.ok]
    start = max((r.times[0] for r in good), default=0.0)
    stop = min((r.times[-1] for r in good), default=0.0)
    if stop <= start:
        return None
    tokens = sum(r.num_output / len(r.times) * sum(start < t <= stop for t in r.times) for r in good)
    return tokens / (stop - start)


def summarise_load(records: Sequence[Record], limits: Limits) -> dict[str, Any]:
    """Rates are over the time from the first request sent to the last answer's end. Milliseconds but where it says s.

    None stands for what no request can tell."""
    good = [record for record in records if record.ok]
    seconds = max((r.finished for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    gaps = [gap for record in good for gap in record.gaps]
    met = sum(limits.met_by(record) for record in records)
    errors = Counter(record.status for record in records if not record.ok and record.status != REFUSED)
    return {
        "requests": len(records),
        "tok/s": sum(r.num_output for r in good) / seconds if seconds else None,
        "decode tok/s": decode_rate(good),
        "req/s": len(good) / seconds if seconds else None,
        "TTFT p50": _ms([r.ttft for r in good], 50),
        "TTFT p99": _ms([r.ttft for r in good], 99),
        "ITL p50": _ms(gaps, 50),
        "ITL p99": _ms(gaps, 99),
        "E2E p50 s": _seconds([r.finished - r.sent for r in good], 50),
        "E2E p99 s": _seconds([r.finished - r.sent for r in good], 99),
        "good": met / len(records) if records else None,
        "good/s": met / seconds if seconds else None,
        "cached": _share(sum(r.num_cached for r in good), sum(r.num_prompt for r in good)),
        "429": sum(r.status == REFUSED for r in records),
        "errors": sum(errors.values()),
        "errors_by_status": {str(status): count for status, count in sorted(errors.items())},
        "seconds": seconds,
        "output_tokens": sum(r.num_output for r in good),
        "prompt_tokens": sum(r.num_prompt for r in good),
        "cached_tokens": sum(r.num_cached for r in good),
    }


def _seconds(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None


def _ms(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) * 1e3 if values else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
