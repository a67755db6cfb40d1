"""The fused operations on a GPU in bfloat16: our kernels for few rows, the library's products for many.

Shape letters as in engine/kernels/table.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.gpu import dense, embed, heads, latent, norm, route, sample
from engine.kernels.table import Routing


class TritonKernels:
    name = "triton"
    is_capturable = True
    reads_packed_experts = True
    needs_powers_of_two = True

    def linear(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        if _is_small(x_TI):
            return dense.linear(x_TI, weight_OI, dtype)
        if dtype is torch.float32:  # logits rounded to bfloat16 would tie, and a tie goes to another token
            return torch.mm(x_TI, weight_OI.t(), out_dtype=dtype)
        return F.linear(x_TI, weight_OI).to(dtype or weight_OI.dtype)

    def partial(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        if not _is_small(x_TI):
            return F.linear(x_TI, weight_OI)
        return dense.linear_parts(x_TI, weight_OI, dense.choose_tile(*weight_OI.shape, x_TI.device))

    def argmax(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids_S = torch.empty(logits_SV.shape[0], dtype=torch.int64, device=logits_SV.device)
        return sample.greedy(logits_SV, ids_S), ids_S

    def embed(self, token_ids_T: torch.Tensor, weight_VD: torch.Tensor, first: int) -> torch.Tensor:
        return embed.embed(token_ids_T, weight_VD, first)

    def rope_angles(self, positions_T: torch.Tensor, frequencies: torch.Tensor, magnitude: float) -> torch.Tensor:
        return embed.rope_angles(positions_T, frequencies, magnitude)

    def silu_mul(self, gate_up_TI: torch.Tensor) -> torch.Tensor:
        return norm.silu_mul(gate_up_TI)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_norm(
        self, partial: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.add_norm(partial, residual_TD, weight_D, eps)

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
        return latent.latents(_parts(self, x_TD, weight), q_norm_Q, kv_norm_C, eps, _angles(cis), cache, slots_T)

    def queries(
        self, q_TQ: torch.Tensor, weight: torch.Tensor | None, nope: int, cis: torch.Tensor, num_heads: int
    ) -> torch.Tensor:
        q_THX = (q_TQ if weight is None else self.linear(q_TQ, weight)).unflatten(-1, (num_heads, -1))
        return latent.rope_in_place(q_THX, nope, _angles(cis))

    def absorbed_queries(
        self,
        q_TQ: torch.Tensor,
        weight: torch.Tensor | None,
        w_k_HNC: torch.Tensor,
        cis: torch.Tensor,
    ) -> torch.Tensor:
        parts_PTW = q_TQ.unsqueeze(0) if weight is None else _parts(self, q_TQ, weight)
        return latent.absorb(parts_PTW, w_k_HNC, _angles(cis))

    def rotate_halves(self, x_THd: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        return heads.rotate_halves(x_THd, _angles(cis))

    def store_heads(self, cache: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor, slots_T: torch.Tensor) -> None:
        heads.store_heads(cache, k_TGd, v_TGd, slots_T)

    def attend_heads(
        self, q_NHd: torch.Tensor, cache: torch.Tensor, table_NB: torch.Tensor, seq_lens_N: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return heads.attend_heads(q_NHd, cache, table_NB, seq_lens_N, scale)

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
        if _is_small(x_TD):
            parts = self.partial(x_TD, weight)
        else:  # float32 here too: logits rounded to bfloat16 would reorder experts
            parts = torch.mm(x_TD, weight.t(), out_dtype=torch.float32).unsqueeze(0)
        return route.route(parts, bias_E, num_tokens_1, local_experts, top_k, normalize, scale, x_TD.dtype, counts_E)


def _is_small(x_TI: torch.Tensor) -> bool:
    return x_TI.shape[0] <= dense.MAX_ROWS


def _parts(kernels: TritonKernels, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """[P, T, O] also where the library makes the whole product."""
    product = kernels.partial(x_TI, weight_OI)
    return product if product.dim() == 3 else product.unsqueeze(0)


def _angles(cis: torch.Tensor) -> torch.Tensor:
    """complex64 [T, R / 2] seen as float32 (cos, sin) pairs, [T, R]."""
    return torch.view_as_real(cis).flatten(-2)
