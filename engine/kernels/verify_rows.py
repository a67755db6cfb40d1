"""What the operations of a verify step hand over, be they plain (engine/verify.py) or kernels (gpu/verify.py).

Shape letters: N requests, M = N x W rows, W of each request in turn, K columns for guesses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

NO_GUESS = -1


class VerifyRows(NamedTuple):
    """token_ids_M, positions_M, slots_M int64; guesses_NK int64; starts_N int64; seq_lens_N int32, those of the last
    rows, 0 for padding; sampling: a SamplingRows with one row each of M."""

    token_ids_M: torch.Tensor
    positions_M: torch.Tensor
    slots_M: torch.Tensor
    guesses_NK: torch.Tensor
    starts_N: torch.Tensor
    seq_lens_N: torch.Tensor
    sampling: Any


class Accepted(NamedTuple):
    """last_N int64: each request's row of the last committed token, among M; positions_N int64 and seq_lens_N int32 of
    that row (0 for padding)."""

    last_N: torch.Tensor
    positions_N: torch.Tensor
    seq_lens_N: torch.Tensor
