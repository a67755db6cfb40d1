"""Turns a scheduler's decision into the tensors of a step that is computed once, in its own shape.

Shape letters: T tokens of the step, N sequences in it, S rows that are sampled.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.comm.dispatcher import TokenDispatcher
from engine.request import Request
from engine.scheduler import ScheduledRequest, SchedulerOutput


class SampledTokens:
    """The last step's tokens on the device, and whose they are: the input of the next step before the host knows them.

    tokens_S: int64 [max_num_seqs].
    """

    def __init__(self, max_num_seqs: int, device: torch.device):
        self.tokens_S = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._requests: list[Request] = []
        self._rows: dict[Request, int] = {}

    def belong_to(self, requests: list[Request]) -> None:
        if requests != self._requests:
            self._requests = requests
            self._rows = {request: row for row, request in enumerate(requests)}

    def sources(self, requests: Iterable[Request]) -> list[int]:
        """For each request the row of its pending token; -1 where the host knows its last token."""
        rows = self._rows
        return [rows[request] if request.num_pending else -1 for request in requests]


class InputBatch:
    """Builds ForwardBatch objects; knows the cache's block size and the device."""

    def __init__(self, block_size: int, device: torch.device, max_num_seqs: int = 64):
        self.block_size, self.device = block_size, device
        self.sampled = SampledTokens(max_num_seqs, device)

    def build(self, output: SchedulerOutput, dispatcher: TokenDispatcher) -> ForwardBatch:
        items = output.scheduled
        query_lens = [item.num_tokens for item in items]
        seq_lens = [item.stop for item in items]
        positions = [np.arange(item.start, item.stop) for item in items]
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
        """Those that the host knows; 0 in the place of a pending one, which is the last of its request."""
        found = []
        for item in items:
            found += item.request.token_ids(item.start, item.stop)
            found += [0] * (item.request.num_pending if item.samples else 0)
        return np.array(found, dtype=np.int64)

    def _take_pending(self, token_ids_T: torch.Tensor, items: list[ScheduledRequest], starts: np.ndarray):
        pending = [n for n, item in enumerate(items) if item.request.num_pending and item.samples]
        if pending:
            sources = self.sampled.sources(items[n].request for n in pending)
            rows, sources = self.send(np.stack([starts[1:][pending] - 1, np.array(sources)])).unbind()
            token_ids_T[rows] = self.sampled.tokens_S[sources]
        return token_ids_T

    def _slots(self, item: ScheduledRequest, positions: np.ndarray) -> np.ndarray:
        size, first = self.block_size, item.start // self.block_size
        blocks = np.array(item.request.block_ids[first : -(-item.stop // size)])
        return blocks[positions // size - first] * size + positions % size

    def _block_table(self, items: list[ScheduledRequest]) -> torch.Tensor:
        used = [item.request.block_ids[: -(-item.stop // self.block_size)] for item in items]
        table = np.zeros((len(used), max(map(len, used))), dtype=np.int64)
        for row, blocks in zip(table, used, strict=True):
            row[: len(blocks)] = blocks
        return self.send(table)

    def send(self, values: np.ndarray) -> torch.Tensor:
        """From pinned memory, so that the host does not wait; PyTorch keeps it until the copy is done."""
        tensor = torch.from_numpy(values)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
