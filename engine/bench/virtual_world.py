"""All ranks of a world on one device: P sets of memory side by side, which the exchange kernels reach by the same
pointers as they would a peer's, and which one launch can serve for all ranks.

It shows what the kernels cost and whether they are right; of links it shows nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kernels.gpu.channel import SETS, Alarm, Channel, Shape
from engine.kernels.gpu.slow_link import slow_link


class VirtualWorld:
    """Channels of P ranks: `once` and `twice` for replicated rows; `local`, `out` and `back` for sharded ones."""

    def __init__(self, shape: Shape, device: torch.device, limit_seconds: float = 5.0):
        self.shape, self.device, self.limit_seconds = shape, device, limit_seconds
        self.memory: list[torch.Tensor] = []
        self.alarm = Alarm.on(device, shape.ranks, shape.ranks)
        rows = SETS * shape.capacity
        self.once = self._channel(shape.one_shot_bytes, rows * shape.ranks)
        self.twice = self._channel(shape.two_shot_bytes, 2 * rows, rows * shape.wide)
        self.local = self._channel(shape.two_shot_bytes, 2 * rows, rows * shape.wide)
        self.back = self._channel(shape.two_shot_bytes, 2 * rows, rows * shape.wide)
        self.out = self._channel(shape.dispatch_bytes, rows, rows * shape.top_k)

    def _channel(self, num_bytes: int, num_rows: int, num_notes: int = 0) -> Channel:
        memory = torch.empty(self.shape.ranks, -(-num_bytes // 16) * 16, dtype=torch.uint8, device=self.device)
        for one in memory:
            self.shape.mark(one[:num_bytes], num_rows, num_notes)
        self.memory.append(memory)
        addresses = torch.tensor([one.data_ptr() for one in memory], device=self.device)
        everyone = addresses.repeat(self.shape.ranks, 1)
        return Channel.over(self.shape, everyone, self.alarm, first_rank=0, limit_seconds=self.limit_seconds)


class Alone:
    """One rank that is each of its own P peers: what it sends to peer p arrives where rank p would have sent it. It
    has the device to itself, as a real rank has, and does all of a rank's work in a one-shot round, `once`.

    With link_ns what goes to other ranks takes so many nanoseconds more, if `carry` runs beside every round.
    """

    def __init__(self, shape: Shape, device: torch.device, limit_seconds: float = 5.0, link_ns: int = 0):
        self.shape, self.device, self.link_ns = shape, device, link_ns
        self.rows, self.room = self._rows(), self._rows()
        self.alarm = Alarm.on(device, shape.ranks)
        senders = shape.capacity * shape.row_bytes * torch.arange(shape.ranks) + self.rows.data_ptr()
        if link_ns:
            senders[1:] += self.room.data_ptr() - self.rows.data_ptr()
        addresses = senders.unsqueeze(0).to(device)
        self.once = Channel.over(shape, addresses, self.alarm, 0, limit_seconds)
        self._carrier = Channel.over(shape, addresses, self.alarm, 0, limit_seconds)

    def _rows(self) -> torch.Tensor:
        memory = torch.empty(self.shape.one_shot_bytes, dtype=torch.uint8, device=self.device)
        self.shape.mark(memory, SETS * self.shape.capacity * self.shape.ranks)
        return memory.view(self.shape.dtype).view(SETS, self.shape.ranks, self.shape.capacity, self.shape.width)

    def carry(self, num_rows: int) -> None:
        """One round's rows over the links; on a stream of its own.

        Raises ValueError for more rows than a GPU has room for beside the kernels that send and wait.
        """
        programs, _ = self._carrier.grid(num_rows)
        if 3 * programs > self._carrier.state.shape[2]:
            raise ValueError(f"{num_rows} rows leave no room for the kernels that links serve; carry fewer at a time.")
        slow_link(self.room, self.rows, self._carrier, num_rows, self.link_ns)


def ranks_of(channel: Channel) -> list[Channel]:
    """Each virtual rank's channel by itself, for a launch of its own; they share what they hold with `channel`."""
    return [
        replace(
            channel,
            addresses_VP=channel.addresses_VP[rank : rank + 1],
            state=channel.state[rank : rank + 1],
            squares=channel.squares[rank : rank + 1],
            alarm=Alarm(channel.alarm.failed_V[rank : rank + 1], channel.alarm.late_V2P[rank : rank + 1]),
            first_rank=rank,
        )
        for rank in range(channel.shape.ranks)
    ]
