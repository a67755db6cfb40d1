"""The tensors of one step, built by the model runner and handed down; nothing here is global.

Shape letters: T tokens of the step, N sequences in it, B blocks a sequence may hold, S rows that are sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from engine.comm.dispatcher import TokenDispatcher


@dataclass
class ForwardBatch:
    """Tokens of N sequences laid end to end.

    token_ids_T, positions_T, slots_T: int64; a slot is block * block_size + offset in the KV cache.
    block_table_NB: int64, rows padded with block 0, which no sequence owns.
    query_lens, seq_lens: host lists of N ints, the tokens of this step and all tokens up to and including them;
    None in a captured step, whose lengths are known on the device alone.
    dispatcher: which rank holds which tokens between attention and attention, chosen for this step.
    query_starts_N1: int32 [N + 1], where each sequence's rows begin, and their end.
    seq_lens_N: int32 [N]; 0 for a padding sequence.
    num_tokens_1: int32 [1]; rows at or beyond it are padding.
    max_query_len: no sequence has more rows in this step.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    block_table_NB: torch.Tensor
    query_lens: list[int] | None
    seq_lens: list[int] | None
    dispatcher: TokenDispatcher
    query_starts_N1: torch.Tensor | None = None
    seq_lens_N: torch.Tensor | None = None
    num_tokens_1: torch.Tensor | None = None
    max_query_len: int = 1
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, made for the first layer that asks and kept for the others."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def parts(
        self, max_short: int, most_cut: int = 0, least_context: int = 0
    ) -> list[tuple[bool, slice, ForwardBatch]]:
        """(short, tokens, batch) a run of neighbours whose queries are all short (up to max_short) or all long. Up to
        most_cut queries behind a context of at least least_context are cut into short ones, a run of their own."""

        def kind(lengths: tuple[int, int]) -> str:
            query_len, seq_len = lengths
            if query_len <= max_short:
                return "short"
            return "cut" if query_len <= most_cut and seq_len - query_len >= max(least_context, 1) else "long"

        return self.once(("parts", max_short, most_cut, least_context), lambda: list(self._cut(max_short, kind)))

    def _cut(
        self, max_short: int, kind: Callable[[tuple[int, int]], str]
    ) -> Iterator[tuple[bool, slice, ForwardBatch]]:
        if self.max_query_len <= max_short:
            yield True, slice(0, self.token_ids_T.shape[0]), self
            return
        first = token = 0
        for name, run in itertools.groupby(zip(self.query_lens, self.seq_lens, strict=True), kind):
            query_lens = [query_len for query_len, _ in run]
            tokens = slice(token, token + sum(query_lens))
            part = self._part(slice(first, first + len(query_lens)), tokens, query_lens)
            yield name != "long", tokens, part._shortened(max_short) if name == "cut" else part
            first, token = first + len(query_lens), tokens.stop

    def _shortened(self, most: int) -> ForwardBatch:
        """The same rows as queries of up to `most` tokens: each sequence as several, of which each sees what comes
        before its own rows."""
        rows, query_lens, seq_lens = [], [], []
        for n, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            for start in range(0, query_len, most):
                count = min(most, query_len - start)
                rows.append(n)
                query_lens.append(count)
                seq_lens.append(seq_len - query_len + start + count)
        starts = [0, *itertools.accumulate(query_lens)]
        values = torch.tensor([*rows, *starts, *seq_lens], dtype=torch.int32)
        if self.block_table_NB.is_cuda:  # from pinned memory, so that the host does not wait
            values = values.pin_memory().to(self.block_table_NB.device, non_blocking=True)
        rows_N, query_starts_N1, seq_lens_N = values.split([len(rows), len(starts), len(rows)])
        return replace(
            self,
            block_table_NB=self.block_table_NB.index_select(0, rows_N),
            query_lens=query_lens,
            seq_lens=seq_lens,
            query_starts_N1=query_starts_N1,
            seq_lens_N=seq_lens_N,
            max_query_len=max(query_lens),
        )

    def _part(self, sequences: slice, tokens: slice, query_lens: list[int]) -> ForwardBatch:
        return replace(
            self,
            token_ids_T=self.token_ids_T[tokens],
            positions_T=self.positions_T[tokens],
            slots_T=self.slots_T[tokens],
            block_table_NB=self.block_table_NB[sequences],
            query_lens=query_lens,
            seq_lens=self.seq_lens[sequences],
            query_starts_N1=self.query_starts_N1[sequences.start : sequences.stop + 1] - tokens.start,
            seq_lens_N=self.seq_lens_N[sequences],
            num_tokens_1=(self.num_tokens_1 - tokens.start).clamp(max=tokens.stop - tokens.start),
            max_query_len=max(query_lens),
        )
