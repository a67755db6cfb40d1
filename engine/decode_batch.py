"""The inputs of a decode step in fixed places, padded to a number of rows: what a captured graph reads.

Shape letters: N rows, one token of one request each, and padding after them; B blocks a request may hold.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.comm.dispatcher import TokenDispatcher
from engine.input_batch import SampledTokens
from engine.sampling import SamplingRows
from engine.scheduler import ScheduledRequest

_ALIGNMENT = 16
_MANY_ROWS = 4


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Powers of two below max_num_seqs, and it: every number of decodes fits one."""
    sizes = [2**i for i in range(max_num_seqs.bit_length()) if 2**i < max_num_seqs]
    return [*sizes, max_num_seqs]


class _Packed:
    """Arrays of several types in one block of memory on the device, and two of the host's that fill it in turn.

    Two, since the copy of one step may still wait on the device while the host fills the next; the tokens of the step
    before that have been read, so its copy is done."""

    def __init__(self, fields: dict[str, tuple[torch.dtype, int]], device: torch.device):
        places, offset = {}, 0
        for name, (dtype, count) in fields.items():
            places[name] = (dtype, offset, count * dtype.itemsize)
            offset += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(offset, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(offset, dtype=torch.uint8, device=device)
        self.tensors = {name: self._device[o : o + n].view(dtype) for name, (dtype, o, n) in places.items()}
        self.arrays = [
            {name: host[o : o + n].view(dtype).numpy() for name, (dtype, o, n) in places.items()}
            for host in self._hosts
        ]
        self.turn = 0

    def send(self) -> None:
        """Copies the host block whose turn it is; the next one is the other's."""
        self._device.copy_(self._hosts[self.turn], non_blocking=True)
        self.turn ^= 1


class BlockTable:
    """Block numbers of each row's request, int64 [max rows, B], on the device; only what is new is sent.

    Entries beyond a request's blocks are leftovers that its length keeps from being read."""

    def __init__(self, num_rows: int, width: int, device: torch.device):
        self.table_NB = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
        self._lists: list[list[int] | None] = [None] * num_rows
        self._counts = [0] * num_rows

    def update(self, items: list[ScheduledRequest]) -> None:
        """A request that lost its blocks has a new list of them, so the list tells whose row it is."""
        grown = []
        for row, item in enumerate(items):
            blocks = item.request.block_ids
            if blocks is not self._lists[row]:
                self._lists[row], self._counts[row] = blocks, 0
            if len(blocks) != self._counts[row]:
                grown.append(row)
        if len(grown) > _MANY_ROWS:
            self._send_rows(grown[0], grown[-1] + 1)
        else:
            for row in grown:
                self._send_new(row)

    def _send_new(self, row: int) -> None:
        blocks, known = self._lists[row], self._counts[row]
        self._copy(self.table_NB[row, known : len(blocks)], np.array(blocks[known:], dtype=np.int64))
        self._counts[row] = len(blocks)

    def _send_rows(self, start: int, stop: int) -> None:
        """All of rows [start, stop) in one piece."""
        table = np.zeros((stop - start, self.table_NB.shape[1]), dtype=np.int64)
        for row in range(start, stop):
            blocks = self._lists[row]
            table[row - start, : len(blocks)] = blocks
            self._counts[row] = len(blocks)
        self._copy(self.table_NB[start:stop], table)

    def _copy(self, target: torch.Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


class DecodeBatch:
    """The inputs of decode steps of at most `num_rows` requests. `fill` brings a step's; the tensors stay in place.

    Padding rows are inert: token 0 at position 0, stored in the null block, of a request of length 0, greedy.
    """

    def __init__(self, num_rows: int, block_size: int, table: BlockTable, sampled: SampledTokens, device: torch.device):
        self.num_rows, self.block_size, self.table, self.sampled = num_rows, block_size, table, sampled
        wide = dict.fromkeys(("token_ids", "positions", "slots", "seeds", "places"), (torch.int64, num_rows))
        whole = dict.fromkeys(("sources", "seq_lens", "top_k"), (torch.int32, num_rows))
        real = dict.fromkeys(("temperature", "top_p", "log_min_p"), (torch.float32, num_rows))
        lengths = {"query_starts": (torch.int32, num_rows + 1), "num_tokens": (torch.int32, 1)}
        self._packed = _Packed(wide | whole | real | lengths, device)
        self._requests: list[list] = [[], []]
        for arrays in self._packed.arrays:
            arrays["query_starts"][:] = np.arange(num_rows + 1)
            arrays["sources"][:] = -1
        for _ in range(2):
            self._packed.send()
        tensors = self._packed.tensors
        self.token_ids_N, self.sources_N = tensors["token_ids"], tensors["sources"]
        self.sampling = SamplingRows(*(tensors[name] for name in SamplingRows.NAMES))

    def fill(self, items: list[ScheduledRequest]) -> None:
        """Writes the rows of a step and sends them in one copy. Raises ValueError for more requests than rows."""
        count = len(items)
        if count > self.num_rows:
            raise ValueError(f"{count} requests do not fit a step of {self.num_rows} rows; use a larger bucket.")
        turn = self._packed.turn
        arrays = self._packed.arrays[turn]
        requests = [item.request for item in items]
        if requests != self._requests[turn]:
            self._fill_requests(arrays, requests, len(self._requests[turn]))
            self._requests[turn] = requests
        starts = [item.start for item in items]
        arrays["positions"][:count] = starts
        stops = arrays["positions"][:count] + 1
        arrays["places"][:count] = stops
        arrays["seq_lens"][:count] = stops
        arrays["slots"][:count] = self._slots(requests, starts)
        arrays["sources"][:count] = sources = self.sampled.sources(requests)
        if min(sources) < 0:
            arrays["token_ids"][:count] = [0 if r.num_pending else r.last_token_id for r in requests]
        self.table.update(items)
        self._packed.send()

    def _slots(self, requests: list, starts: list[int]) -> list[int]:
        size = self.block_size
        return [r.block_ids[s // size] * size + s % size for r, s in zip(requests, starts, strict=True)]

    def _fill_requests(self, arrays: dict[str, np.ndarray], requests: list, before: int) -> None:
        """What stays the same while the same requests run, and padding where fewer run than before."""
        count = len(requests)
        arrays["num_tokens"][0] = count
        for name in ("token_ids", "positions", "slots", "seq_lens", "places", "temperature"):
            arrays[name][count:before] = 0
        arrays["sources"][count:before] = -1
        SamplingRows.fill(arrays, requests)

    def forward_batch(self, token_ids_N: torch.Tensor, dispatcher: TokenDispatcher) -> ForwardBatch:
        """token_ids_N: the tokens with the pending ones in their places."""
        tensors = self._packed.tensors
        return ForwardBatch(
            token_ids_T=token_ids_N,
            positions_T=tensors["positions"],
            slots_T=tensors["slots"],
            block_table_NB=self.table.table_NB[: self.num_rows],
            query_lens=None,
            seq_lens=None,
            dispatcher=dispatcher,
            query_starts_N1=tensors["query_starts"],
            seq_lens_N=tensors["seq_lens"],
            num_tokens_1=tensors["num_tokens"],
            max_query_len=1,
        )
