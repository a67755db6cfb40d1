"""Plain PyTorch attention over the paged latent cache."""

from __future__ import annotations

import torch

from engine.batch import ForwardBatch
from engine.kernels import reference


class ReferenceAttention:
    """All requests in the absorbed form, whatever their number of query tokens."""

    name = "reference"
    is_capturable = False
    max_absorbed_query_len: int | None = None
    most_cut_queries = least_cut_context = 0

    def attend(
        self, q_THX: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, scale: float, w_v_HVC: torch.Tensor
    ) -> torch.Tensor:
        out_THC = reference.mla_paged(
            q_THX, cache, batch.block_table_NB, batch.query_lens, batch.seq_lens, scale, w_v_HVC.shape[2]
        )
        return torch.bmm(out_THC.transpose(0, 1), w_v_HVC.transpose(1, 2)).transpose(0, 1)

    def prefill(
        self,
        q_THX: torch.Tensor,
        kv_TX: torch.Tensor,
        cache: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
        kv_b_weight: torch.Tensor,
    ) -> torch.Tensor:
        return reference.mla_prefill(
            q_THX, kv_TX, cache, batch.block_table_NB, batch.query_lens, batch.seq_lens, scale, kv_b_weight
        )
