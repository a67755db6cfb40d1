"""Turns a scheduler's decision into the tensors of a step."""

from __future__ import annotations

import itertools

import torch

from engine.batch import ForwardBatch
from engine.comm.dispatcher import TokenDispatcher
from engine.scheduler import ScheduledRequest, SchedulerOutput


class InputBatch:
    """Builds ForwardBatch objects; knows the cache's block size and the device."""

    def __init__(self, block_size: int, device: torch.device):
        self.block_size, self.device = block_size, device

    def build(self, output: SchedulerOutput, dispatcher: TokenDispatcher) -> ForwardBatch:
        items = output.scheduled
        token_ids = [t for item in items for t in item.request.token_ids(item.start, item.stop)]
        positions = [p for item in items for p in range(item.start, item.stop)]
        slots = [slot for item in items for slot in self._slots(item)]
        query_lens = [item.num_tokens for item in items]
        seq_lens = [item.stop for item in items]
        return ForwardBatch(
            token_ids_T=self._tensor(token_ids),
            positions_T=self._tensor(positions),
            slots_T=self._tensor(slots),
            block_table_NB=self._block_table(items),
            query_lens=query_lens,
            seq_lens=seq_lens,
            dispatcher=dispatcher,
            query_starts_N1=self._tensor([0, *itertools.accumulate(query_lens)], torch.int32),
            seq_lens_N=self._tensor(seq_lens, torch.int32),
            num_tokens_1=self._tensor([len(token_ids)], torch.int32),
            max_query_len=max(query_lens),
        )

    def _slots(self, item: ScheduledRequest) -> list[int]:
        size, blocks = self.block_size, item.request.block_ids
        return [blocks[p // size] * size + p % size for p in range(item.start, item.stop)]

    def _block_table(self, items: list[ScheduledRequest]) -> torch.Tensor:
        used = [item.request.block_ids[: -(-item.stop // self.block_size)] for item in items]
        width = max(len(blocks) for blocks in used)
        return self._tensor([blocks + [0] * (width - len(blocks)) for blocks in used])

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
