"""What the host says of a decode step, in fixed places and padded to a number of requests: what a captured graph reads.

Shape letters: N requests, and padding after them; K guesses; W rows a request; B blocks a request may hold.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.comm.dispatcher import TokenDispatcher
from engine.input_batch import SampledTokens
from engine.request import Request
from engine.sampling import SamplingRows
from engine.scheduler import ScheduledRequest
from engine.verify import NO_GUESS, StepRequests, VerifyRows

_ALIGNMENT = 16
_MANY_ROWS = 4


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Powers of two below max_num_seqs, and it: every number of requests fits one."""
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
    """The inputs of decode steps of at most `num_requests` requests, however many guesses of each are verified. `fill`
    brings a step's; the tensors stay in place.

    Padding requests have no slot, so that their rows are inert.
    """

    def __init__(
        self, num_requests: int, block_size: int, table: BlockTable, sampled: SampledTokens, device: torch.device
    ):
        self.num_requests, self.block_size, self.table, self.sampled = num_requests, block_size, table, sampled
        self.num_guesses = sampled.state.guesses_SK.shape[1]
        wide = dict.fromkeys(("token_ids", "starts", "limits", "seeds"), (torch.int64, num_requests))
        guesses = {"guesses": (torch.int64, num_requests * self.num_guesses)}
        whole = dict.fromkeys(("sources", "top_k"), (torch.int32, num_requests))
        real = dict.fromkeys(("temperature", "top_p", "log_min_p"), (torch.float32, num_requests))
        counts = dict.fromkeys(("num_rows", "num_real"), (torch.int32, 1))
        self._packed = _Packed(wide | guesses | whole | real | counts, device)
        self._held: list[list] = [[], []]
        for arrays in self._packed.arrays:
            arrays["sources"][:] = -1
            arrays["guesses"][:] = NO_GUESS
        for _ in range(2):
            self._packed.send()
        tensors = self._packed.tensors
        self.requests = StepRequests(
            token_ids_N=tensors["token_ids"],
            starts_N=tensors["starts"],
            guesses_NK=tensors["guesses"].view(num_requests, self.num_guesses),
            sources_N=tensors["sources"],
            limits_N=tensors["limits"],
            table_NB=table.table_NB[:num_requests],
        )
        sampling = {name: tensors[name] for name in SamplingRows.NAMES if name != "places"}
        self.sampling = SamplingRows(**sampling, places=tensors["starts"])
        self.num_rows_1, self.num_real_1 = tensors["num_rows"], tensors["num_real"]

    def fill(self, items: list[ScheduledRequest], width: int) -> None:
        """Writes a step of `width` rows a request and sends it in one copy. Raises ValueError for too many requests."""
        count = len(items)
        if count > self.num_requests:
            raise ValueError(f"{count} requests do not fit a step of {self.num_requests}; use a larger bucket.")
        turn = self._packed.turn
        arrays = self._packed.arrays[turn]
        requests = [item.request for item in items]
        if requests != self._held[turn]:
            self._fill_requests(arrays, requests, len(self._held[turn]))
            self._held[turn] = requests
        arrays["num_rows"][0] = count * width
        arrays["starts"][:count] = [item.start for item in items]
        arrays["limits"][:count] = [len(r.block_ids) * self.block_size for r in requests]
        arrays["sources"][:count] = sources = self.sampled.sources(requests)
        if min(sources) < 0:
            arrays["token_ids"][:count] = [0 if r.num_pending else r.last_token_id for r in requests]
            if self.num_guesses:
                arrays["guesses"].reshape(-1, self.num_guesses)[:count] = [self._guesses(r) for r in requests]
        self.table.update(items)
        self._packed.send()

    def _guesses(self, request: Request) -> list[int]:
        return request.guess_ids + [NO_GUESS] * (self.num_guesses - len(request.guess_ids))

    def _fill_requests(self, arrays: dict[str, np.ndarray], requests: list, before: int) -> None:
        """What stays the same while the same requests run, and padding where fewer run than before."""
        count = len(requests)
        arrays["num_real"][0] = count
        for name in ("token_ids", "starts", "limits", "temperature"):
            arrays[name][count:before] = 0
        arrays["sources"][count:before] = -1
        SamplingRows.fill(arrays, requests)

    def forward_batch(
        self, rows: VerifyRows, query_starts_N1: torch.Tensor, width: int, dispatcher: TokenDispatcher
    ) -> ForwardBatch:
        """The target's step; query_starts_N1: int32, 0, W, 2 W, ..."""
        return ForwardBatch(
            token_ids_T=rows.token_ids_M,
            positions_T=rows.positions_M,
            slots_T=rows.slots_M,
            block_table_NB=self.requests.table_NB,
            query_lens=None,
            seq_lens=None,
            dispatcher=dispatcher,
            query_starts_N1=query_starts_N1,
            seq_lens_N=rows.seq_lens_N,
            num_tokens_1=self.num_rows_1,
            max_query_len=width,
        )
