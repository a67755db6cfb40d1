"""The fused operations in plain PyTorch: compositions of the twins in `reference`. Shape letters as in table.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import reference
from engine.kernels.table import Routing


class ReferenceKernels:
    name = "reference"
    is_capturable = False
    reads_packed_experts = False
    needs_powers_of_two = False

    def linear(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return F.linear(x_TI, weight_OI).to(dtype or weight_OI.dtype)

    def partial(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, weight_OI)

    def argmax(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logits_SV.amax(dim=-1), logits_SV.argmax(dim=-1)

    def embed(self, token_ids_T: torch.Tensor, weight_VD: torch.Tensor, first: int) -> torch.Tensor:
        return reference.embed(token_ids_T, weight_VD, first)

    def rope_angles(self, positions_T: torch.Tensor, frequencies: torch.Tensor, magnitude: float) -> torch.Tensor:
        return reference.rope_angles(positions_T, frequencies, magnitude)

    def silu_mul(self, gate_up_TI: torch.Tensor) -> torch.Tensor:
        return reference.silu_mul(gate_up_TI)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return reference.rms_norm(x, weight, eps)

    def add_norm(
        self, partial: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.add_norm(partial, residual_TD, weight_D, eps)

    def latents(
        self,
        x_TD: torch.Tensor,
        weight: torch.Tensor,
        q_norm_Q: torch.Tensor | None,
        kv_norm_C: torch.Tensor,
        eps: float,
        cis: torch.Tensor,
        cache: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        widths = (kv_norm_C.shape[0], 2 * cis.shape[1])
        q_TQ, latent_TC, key_TR = F.linear(x_TD, weight).split([weight.shape[0] - sum(widths), *widths], dim=-1)
        rows_TX = torch.cat(
            [reference.rms_norm(latent_TC, kv_norm_C, eps), reference.rotate_pairs(key_TR, cis)], dim=-1
        )
        rows_TX = reference.store_latent(cache, rows_TX, slots_T, widths[0])
        return q_TQ if q_norm_Q is None else reference.rms_norm(q_TQ, q_norm_Q, eps), rows_TX

    def queries(
        self, q_TQ: torch.Tensor, weight: torch.Tensor | None, nope: int, cis: torch.Tensor, num_heads: int
    ) -> torch.Tensor:
        q_THX = (q_TQ if weight is None else F.linear(q_TQ, weight)).unflatten(-1, (num_heads, -1))
        return torch.cat([q_THX[..., :nope], reference.rotate_pairs(q_THX[..., nope:], cis)], dim=-1)

    def absorbed_queries(
        self,
        q_TQ: torch.Tensor,
        weight: torch.Tensor | None,
        w_k_HNC: torch.Tensor,
        cis: torch.Tensor,
    ) -> torch.Tensor:
        num_heads, nope, _ = w_k_HNC.shape
        q_THX = self.queries(q_TQ, weight, nope, cis, num_heads)
        return reference.absorb(q_THX, w_k_HNC)

    def rotate_halves(self, x_THd: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        return reference.rotate_halves(x_THd, cis)

    def store_heads(self, cache: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor, slots_T: torch.Tensor) -> None:
        reference.store_heads(cache, k_TGd, v_TGd, slots_T)

    def attend_heads(
        self, q_NHd: torch.Tensor, cache: torch.Tensor, table_NB: torch.Tensor, seq_lens_N: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return reference.attend_heads(q_NHd, cache, table_NB, seq_lens_N, scale)

    def route(
        self,
        x_TD: torch.Tensor,
        weight: torch.Tensor,
        bias_E: torch.Tensor,
        num_tokens_1: torch.Tensor,
        local_experts: range,
        top_k: int,
        normalize: bool,
        scale: float,
        counts_E: torch.Tensor | None = None,
    ) -> Routing:
        num_experts = bias_E.shape[0]
        # Scores in float32 throughout: logits rounded to bfloat16 would reorder experts.
        logits_TE = F.linear(x_TD.float(), weight[:num_experts].float())
        ids_TK, weights_TK = reference.route(logits_TE, bias_E, top_k, normalize, scale)
        if counts_E is not None:
            reference.count_experts(ids_TK, num_tokens_1, counts_E)
        ids_TK = reference.local_ids(ids_TK, local_experts, num_tokens_1)
        return Routing(ids_TK, weights_TK, reference.silu_mul(F.linear(x_TD, weight[num_experts:])))
