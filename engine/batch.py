"""The tensors of one step, built by the model runner and handed down; nothing here is global.

Shape letters: T tokens of the step, N sequences in it, B blocks a sequence may hold, S rows that are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.comm.dispatcher import TokenDispatcher


@dataclass
class ForwardBatch:
    """Tokens of N sequences laid end to end.

    token_ids_T, positions_T, slots_T: int64; a slot is block * block_size + offset in the KV cache.
    block_table_NB: int64, rows padded with block 0, which no sequence owns.
    query_lens, seq_lens: host lists of N ints, the tokens of this step and all tokens up to and including them; None
    in a captured step, whose lengths are known on the device alone.
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
