"""One rank's channels over symmetric memory, and the cutting of long steps into rounds that fit them.

Shape letters: T rows, t rows of this rank, R = P * t rows it may be sent, K experts a row, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from engine.comm import symmetric
from engine.comm.dispatcher import DispatchLimits, Norm
from engine.comm.parallel_state import ParallelState
from engine.comm.symmetric import WAIT_SECONDS, PeerMemory

_ONE_SHOT_ROWS = 1024  # of all senders together; more rows take several rounds, and two-shot sooner wins anyway
_TWO_SHOT_ROWS = 2048


class Rounds:
    """How the rows of a step are cut: at most `capacity` at a time, each piece shared out over all ranks anew."""

    def __init__(self, num_rows: int, capacity: int, ranks: int):
        self.num_rows, self.ranks = num_rows, ranks
        starts = range(0, num_rows, capacity)
        self.pieces = [slice(start, min(start + capacity, num_rows)) for start in starts]
        self.shares = [-(-(piece.stop - piece.start) // ranks) for piece in self.pieces]

    @property
    def num_own(self) -> int:
        """Rows of this rank in all, padding included."""
        return sum(self.shares)

    def own(self) -> list[slice]:
        """This rank's rows [t] by piece."""
        ends = [sum(self.shares[: index + 1]) for index in range(len(self.shares))]
        return [slice(end - share, end) for end, share in zip(ends, self.shares, strict=True)]

    def received(self) -> list[slice]:
        """Rows [R] that `dispatch` brings, by piece."""
        return [slice(self.ranks * own.start, self.ranks * own.stop) for own in self.own()]

    def rows_of(self, rank: int) -> Iterator[tuple[slice, slice]]:
        """(rows among all, rows among the rank's own) that are no padding, by piece."""
        for piece, share, own in zip(self.pieces, self.shares, self.own(), strict=True):
            start = min(piece.start + rank * share, piece.stop)
            stop = min(start + share, piece.stop)
            yield slice(start, stop), slice(own.start, own.start + stop - start)


class Exchange:
    """The kernels' channels of one rank and one dispatcher. Collective to build."""

    def __init__(self, parallel: ParallelState, limits: DispatchLimits):
        from engine.kernels.gpu.channel import Alarm

        self.parallel, self.limits = parallel, limits
        self.alarm = Alarm.on(parallel.device, parallel.tp)
        self._memories: list[PeerMemory] = []

    def one_shot_channel(self):
        capacity = min(_round_up(self.limits.max_tokens, self.parallel.tp), max(_ONE_SHOT_ROWS // self.parallel.tp, 64))
        shape = self._shape(capacity)
        return self._open(shape, shape.one_shot_bytes, 3 * self.parallel.tp * capacity)

    def two_shot_channel(self, capacity: int | None = None):
        capacity = capacity or min(self.limits.max_tokens, _TWO_SHOT_ROWS)
        shape = self._shape(_round_up(capacity, self.parallel.tp))
        return self._open(shape, shape.two_shot_bytes, 6 * shape.capacity, 3 * shape.capacity * shape.wide)

    def dispatch_channel(self, capacity: int):
        shape = self._shape(_round_up(capacity, self.parallel.tp))
        return self._open(shape, shape.dispatch_bytes, 3 * shape.capacity, 3 * shape.capacity * shape.top_k)

    def _shape(self, capacity: int):
        from engine.kernels.gpu.channel import Shape

        limits = self.limits
        return Shape(self.parallel.tp, capacity, limits.width, limits.dtype, limits.top_k)

    def _open(self, shape, num_bytes: int, num_rows: int, num_notes: int = 0):
        from engine.kernels.gpu.channel import Channel

        memory = PeerMemory(self.parallel, num_bytes)
        shape.mark(memory.local[:num_bytes], num_rows, num_notes)
        self._memories.append(memory)
        return Channel.over(shape, memory.addresses_1P, self.alarm, self.parallel.rank, WAIT_SECONDS)

    def ready(self) -> None:
        """Waits until all ranks have made all their memory ready."""
        torch.cuda.synchronize(self.parallel.device)
        dist.barrier(group=self.parallel.group, device_ids=[self.parallel.device.index or 0])

    def failure(self) -> str | None:
        """Why a kernel gave up waiting, if one did; read without waiting for the device."""
        direct, indirect = (late.nonzero().flatten().tolist() for late in self.alarm.late_V2P[0])
        if not direct and not indirect:
            return None
        return f"rows of rank {(direct or indirect)[0]} did not arrive within {WAIT_SECONDS:g} s"

    def close(self) -> None:
        self._memories.clear()


class OverPeerMemory:
    """What a dispatcher says whose rows go through an Exchange; on CPUs and on one rank it has none."""

    _exchange: Exchange | None = None

    @classmethod
    def obstacle(cls, parallel: ParallelState, limits: DispatchLimits) -> str | None:
        return symmetric.obstacle(parallel, limits)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def failure(self) -> str | None:
        return self._exchange and self._exchange.failure()


def uses_peer_memory(parallel: ParallelState) -> bool:
    return parallel.device.type == "cuda" and not parallel.is_alone


def one_shot(
    channel, partial: torch.Tensor, residual_TD: torch.Tensor, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """`channel.one_shot` in as many rounds as it takes. partial: [T, D] or parts [S, T, D]."""
    from engine.kernels.gpu import channel as kernels

    rounds = Rounds(residual_TD.shape[0], channel.shape.capacity, channel.shape.ranks)
    if len(rounds.pieces) == 1:
        return kernels.one_shot(partial.contiguous(), residual_TD.contiguous(), norm.weight, norm.eps, channel)
    out = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    for piece in rounds.pieces:
        kernels.one_shot(
            partial[..., piece, :].contiguous(),
            residual_TD[piece],
            norm.weight,
            norm.eps,
            channel,
            out=(out[0][piece], out[1][piece]),
        )
    return out


def two_shot(
    channel, partial: torch.Tensor, residual_tD: torch.Tensor, norm: Norm, num_rows: int, gather: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`channel.two_shot` in as many rounds as it takes."""
    from engine.kernels.gpu import channel as kernels

    rounds = Rounds(num_rows, channel.shape.capacity, channel.shape.ranks)
    x = residual_tD.new_empty(num_rows if gather else rounds.num_own, residual_tD.shape[1])
    new_tD = torch.empty_like(residual_tD)
    for piece, own in zip(rounds.pieces, rounds.own(), strict=True):
        kernels.two_shot(
            partial[..., piece, :].contiguous(),
            residual_tD[own],
            norm.weight,
            norm.eps,
            channel,
            piece.stop - piece.start,
            gather,
            out=(x[piece] if gather else x[own], new_tD[own]),
        )
    return x, new_tD


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
