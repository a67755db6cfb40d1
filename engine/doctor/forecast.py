"""The step model: bytes over the measured read rate and the kernels' efficiency, plus the measured rounds.

Decode of one sequence with k drafts verifies k + 1 rows in one step, so it reads more experts and sends messages
k + 1 times as large; whether that pays is a property of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.doctor.placement import Placement, at_rows

ACCEPT_LENGTHS = (2.0, 2.5, 3.0)
DRAFTS = (1, 2, 3)
LONGEST = max(DRAFTS)
DRAFT_WIDTHS_SQUARED = 12.85
"""Parameters of an EAGLE-3 draft layer with its input product, over D^2: 0.66e9 at D = 7168; its head comes on top."""
DRAFT_ROUNDS = 4
"""Of one guess: the sums after embedding, attention and MLP, and the exchange that chooses its token."""
PAYS = 1.03
"""A gain below it is no gain: runs differ by as much."""


@dataclass(frozen=True)
class Efficiency:
    """Fraction of the byte roofline that kernels reach, by rows of the step; `source` says where it was measured."""

    by_rows: Mapping[int, float]
    source: str

    def at(self, rows: int) -> float:
        return at_rows(self.by_rows, rows)


@dataclass(frozen=True)
class Machine:
    """What the model needs to know of a machine.

    read_bytes_per_second: streaming read of one rank's device. comm_seconds: rows -> all rounds of a step on the
    slowest rank. round_seconds: rows -> one sum over all ranks, as a draft has.
    """

    read_bytes_per_second: float
    efficiency: Efficiency
    comm_seconds: Mapping[int, float]
    round_seconds: Mapping[int, float]
    context: int = 4096


@dataclass(frozen=True)
class Step:
    """Seconds of a step, in its parts."""

    kernels: float
    comm: float

    @property
    def seconds(self) -> float:
        return self.kernels + self.comm


@dataclass(frozen=True)
class Forecast:
    """Of one sequence. `verify` and `draft` by number of drafts; a draft entry holds all k of them."""

    plain: Step
    verify: Mapping[int, Step]
    draft: Mapping[int, Step]

    @property
    def plain_rate(self) -> float:
        return 1 / self.plain.seconds

    def iteration(self, k: int) -> float:
        """Seconds of drafting and verifying."""
        return self.verify[k].seconds + self.draft[k].seconds

    def rate(self, k: int, accept_length: float) -> float:
        """Tokens a second with k drafts; accept_length is the one that LONGEST drafts reach."""
        return accepted(accept_length, k) / self.iteration(k)

    def best(self, accept_length: float) -> tuple[int, float]:
        """(number of drafts, gain over plain decoding) that goes fastest, speculation forced."""
        k = max(DRAFTS, key=lambda one: self.rate(one, accept_length))
        return k, self.rate(k, accept_length) / self.plain_rate

    def break_even(self) -> float:
        """The accept length of LONGEST drafts from which speculation gains, with the best number of drafts."""
        low, high = 1.0, float(LONGEST + 1)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.best(middle)[1] >= 1 else (middle, high)
        return high

    def verdict(self) -> str:
        """Whether speculation pays, in words."""
        gains = [self.best(length) for length in ACCEPT_LENGTHS]
        shown = ", ".join(
            f"{gain:.2f}x at accept length {length} (k={k})"
            for length, (k, gain) in zip(ACCEPT_LENGTHS, gains, strict=True)
        )
        share = self.verify[LONGEST].comm / self.iteration(LONGEST)
        if gains[-1][1] < PAYS:
            head, tail = "Speculation does not pay on this machine", _why_not(self, share)
        elif gains[0][1] >= PAYS:
            head, tail = "Speculation pays on this machine", ""
        else:
            head, tail = f"Speculation pays on this machine from an accept length of {self.break_even():.2f}", ""
        return f"{head}: {shown} against {self.plain_rate:.3g} tokens/s plain.{tail}"


def _why_not(forecast: Forecast, share: float) -> str:
    growth = forecast.verify[LONGEST].comm / forecast.plain.comm if forecast.plain.comm else 1.0
    if share < 0.25:
        return " The extra experts that a verify step reads cost more than it gains."
    return (
        f" A verify of {LONGEST + 1} rows spends {forecast.verify[LONGEST].comm * 1e3:,.1f} ms in rounds, "
        f"{share:.0%} of an iteration and {growth:.1f}x those of a plain step: mend the links first."
    )


def accepted(accept_length: float, k: int) -> float:
    """Mean tokens kept of k drafts, where LONGEST drafts keep `accept_length` and every draft is accepted alike.

    1 + p + ... + p^k with the p that gives accept_length for LONGEST drafts.
    """
    if k == LONGEST:
        return accept_length
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if _kept(p, LONGEST) < accept_length else (low, p)
    return _kept(low, k)


def _kept(p: float, k: int) -> float:
    return sum(p**i for i in range(k + 1))


def forecast(placement: Placement, machine: Machine) -> Forecast:
    """Plain decoding and k drafts of one sequence at `machine.context`."""
    draft = _draft_step(placement, machine)
    return Forecast(
        _step(placement, machine, 1),
        {k: _step(placement, machine, k + 1) for k in DRAFTS},
        {k: _drafts(draft, k, machine) for k in DRAFTS},
    )


def _step(placement: Placement, machine: Machine, rows: int) -> Step:
    roofline = placement.bytes_read(rows, machine.context) / machine.read_bytes_per_second
    return Step(roofline / machine.efficiency.at(rows), at_rows(machine.comm_seconds, rows))


def _draft_step(placement: Placement, machine: Machine) -> Step:
    """One guess of a draft sliced over all ranks: one layer, the whole vocabulary's head, its rounds."""
    layer = DRAFT_WIDTHS_SQUARED * placement.config.hidden_size**2 / placement.tp
    read = (layer + placement.sizes.head) * 2 / machine.read_bytes_per_second
    return Step(read / machine.efficiency.at(1), DRAFT_ROUNDS * at_rows(machine.round_seconds, 1))


def _drafts(guess: Step, k: int, machine: Machine) -> Step:
    """k guesses, and the sum of the target's features of all rows that comes before them."""
    return Step(k * guess.kernels, k * guess.comm + at_rows(machine.round_seconds, k + 1))


def anchored(machine: Machine, placement: Placement, plain_rate: float) -> Machine:
    """`machine` with the efficiency that makes plain decoding run at the measured `plain_rate` tokens a second.

    Raises ValueError where the rounds alone take longer than a token.
    """
    kernels = 1 / plain_rate - at_rows(machine.comm_seconds, 1)
    if kernels <= 0:
        raise ValueError(
            f"{plain_rate:g} tokens/s leave {1e3 / plain_rate:.3g} ms a token, but the rounds of a step were measured "
            f"at {at_rows(machine.comm_seconds, 1) * 1e3:.3g} ms; give the rate of this machine and placement."
        )
    fraction = placement.bytes_read(1, machine.context) / machine.read_bytes_per_second / kernels
    return replace(machine, efficiency=Efficiency({1: fraction}, f"from {plain_rate:g} tokens/s plain, as given"))
