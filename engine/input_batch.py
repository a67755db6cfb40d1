"""Turns a scheduler's decision into the tensors of a step that is computed once, in its own shape.

Shape letters: T rows of the step, N sequences in it, S of them sampled, W rows of each that are drawn from, M = S x W,
K guesses, B blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.comm.dispatcher import TokenDispatcher
from engine.request import Request
from engine.sampling import SamplingRows
from engine.scheduler import ScheduledRequest, SchedulerOutput
from engine.verify import NO_GUESS, CommittedTokens, StepRequests, VerifyRows


class SampledTokens:
    """What the last step left on the device, and whose it is: the input of the next step before the host knows it."""

    def __init__(self, max_num_seqs: int, device: torch.device, num_guesses: int = 0):
        self.state = CommittedTokens.empty(max_num_seqs, num_guesses, device)
        self._requests: list[Request] = []
        self._rows: dict[Request, int] = {}

    def belong_to(self, requests: list[Request]) -> None:
        if requests != self._requests:
            self._requests = requests
            self._rows = {request: row for row, request in enumerate(requests)}

    def sources(self, requests: Iterable[Request]) -> list[int]:
        """For each request the row of its pending tokens; -1 where the host knows its last token."""
        rows = self._rows
        return [rows[request] if request.num_pending else -1 for request in requests]


@dataclass
class SampledRows:
    """The rows of a step that are drawn from. Requests with fewer guesses than others repeat their last row.

    rows_M int64: which of the step's T rows. requests, rows: as a verify step has them, without what only its forward
    pass needs. draws: some request is not greedy.
    """

    rows_M: torch.Tensor
    requests: StepRequests
    rows: VerifyRows
    draws: bool


class InputBatch:
    """Builds ForwardBatch objects; knows the cache's block size and the device."""

    def __init__(self, block_size: int, device: torch.device, max_num_seqs: int = 64, num_guesses: int = 0):
        self.block_size, self.device = block_size, device
        self.sampled = SampledTokens(max_num_seqs, device, num_guesses)

    def build(self, output: SchedulerOutput, dispatcher: TokenDispatcher) -> ForwardBatch:
        """Guesses must be known to the host."""
        items = output.scheduled
        query_lens = [item.num_rows for item in items]
        seq_lens = [item.start + item.num_rows for item in items]
        positions = [np.arange(item.start, item.start + item.num_rows) for item in items]
        slots = [self._slots(item, p) for item, p in zip(items, positions, strict=True)]
        starts = np.cumsum([0, *query_lens])
        token_ids_T, positions_T, slots_T = self.send(
            np.stack([self._token_ids(items), np.concatenate(positions), np.concatenate(slots)])
        ).unbind()
        lengths = self.send(np.concatenate([starts, seq_lens, starts[-1:]]).astype(np.int32))
        query_starts_N1, seq_lens_N, num_tokens_1 = lengths.split([len(items) + 1, len(items), 1])
        return ForwardBatch(
            token_ids_T=self._take_pending(token_ids_T, items, starts),
            positions_T=positions_T,
            slots_T=slots_T,
            block_table_NB=self._block_table(items),
            query_lens=query_lens,
            seq_lens=seq_lens,
            dispatcher=dispatcher,
            query_starts_N1=query_starts_N1,
            seq_lens_N=seq_lens_N,
            num_tokens_1=num_tokens_1,
            max_query_len=max(query_lens),
        )

    def _token_ids(self, items: list[ScheduledRequest]) -> np.ndarray:
        """Those that the host knows, then guesses; 0 for a pending one, which is the last of its request."""
        found = []
        for item in items:
            found += item.request.token_ids(item.start, item.stop)
            found += [0] * (item.request.num_pending if item.samples else 0)
            found += item.request.guess_ids[: item.num_guesses]
        return np.array(found, dtype=np.int64)

    def _take_pending(self, token_ids_T: torch.Tensor, items: list[ScheduledRequest], starts: np.ndarray):
        pending = [n for n, item in enumerate(items) if item.request.num_pending and item.samples]
        if pending:
            sources = self.sampled.sources(items[n].request for n in pending)
            rows, sources = self.send(np.stack([starts[1:][pending] - 1, np.array(sources)])).unbind()
            state = self.sampled.state
            token_ids_T[rows] = state.tokens_SW[sources, state.accepted_S[sources].long()]
        return token_ids_T

    def sampled_rows(self, output: SchedulerOutput, batch: ForwardBatch) -> SampledRows | None:
        """Of the step that `batch` was built for; None where no request of it is sampled."""
        ends = np.cumsum(batch.query_lens)
        chosen = [n for n, item in enumerate(output.scheduled) if item.samples]
        if not chosen:
            return None
        items = [output.scheduled[n] for n in chosen]
        width = 1 + max(item.num_guesses for item in items)
        firsts = np.array([item.stop - 1 for item in items])
        counts = np.array([item.num_guesses for item in items])
        offsets = np.minimum(np.arange(width), counts[:, None])
        rows = (ends[chosen] - 1 - counts)[:, None] + offsets
        limits = np.array([len(item.request.block_ids) * self.block_size for item in items])
        whole = np.concatenate([self._guesses(items, width), firsts[:, None], limits[:, None]], axis=1)
        guesses_NK, starts_N, limits_N = self.send(whole.astype(np.int64)).split([whole.shape[1] - 2, 1, 1], dim=1)
        sampling = SamplingRows.of(
            [item.request for item in items for _ in range(width)], (firsts[:, None] + offsets + 1).ravel(), self.device
        )
        table_NB = batch.block_table_NB[self.send(np.array(chosen))]
        starts_N, limits_N = starts_N[:, 0], limits_N[:, 0]
        rows_M = self.send(rows.ravel())
        seq_lens_N = (starts_N + width).int()
        return SampledRows(
            rows_M,
            StepRequests(None, starts_N, guesses_NK, None, limits_N, table_NB),
            VerifyRows(None, None, None, guesses_NK, starts_N, seq_lens_N, sampling),
            draws=not all(item.request.params.greedy for item in items),
        )

    def _guesses(self, items: list[ScheduledRequest], width: int) -> np.ndarray:
        """[S, K]: those that the step verifies, and one more after the last row, which is compared alone."""
        guesses = np.full((len(items), self.sampled.state.guesses_SK.shape[1]), NO_GUESS, dtype=np.int64)
        for row, item in zip(guesses, items, strict=True):
            known = item.request.guess_ids[: item.num_guesses + (item.num_guesses + 1 == width)]
            row[: len(known)] = known
        return guesses

    def next_tokens(self, output: SchedulerOutput, batch: ForwardBatch) -> torch.Tensor:
        """int64 [T]: the token after each row's as far as the step's own input tells, 0 after those drawn from."""
        next_ids_T = batch.token_ids_T.roll(-1)
        ends = np.cumsum(batch.query_lens) - 1
        after = [0 if i.samples else i.request.token_ids(i.stop, i.stop + 1)[0] for i in output.scheduled]
        rows, values = self.send(np.stack([ends, np.array(after)])).unbind()
        next_ids_T[rows] = values
        return next_ids_T

    def _slots(self, item: ScheduledRequest, positions: np.ndarray) -> np.ndarray:
        size, first = self.block_size, item.start // self.block_size
        blocks = np.array(item.request.block_ids[first : -(-(item.start + item.num_rows) // size)])
        return blocks[positions // size - first] * size + positions % size

    def _block_table(self, items: list[ScheduledRequest]) -> torch.Tensor:
        """All blocks of a request, since a draft's chain goes on beyond the step, and the null block behind them, since
        it may go on beyond those."""
        beyond = -(-2 * self.sampled.state.guesses_SK.shape[1] // self.block_size)
        used = [item.request.block_ids + [0] * beyond for item in items]
        table = np.zeros((len(used), max(map(len, used))), dtype=np.int64)
        for row, blocks in zip(table, used, strict=True):
            row[: len(blocks)] = blocks
        return self.send(table)

    def send(self, values: np.ndarray) -> torch.Tensor:
        """From pinned memory, so that the host does not wait; PyTorch keeps it until the copy is done."""
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
