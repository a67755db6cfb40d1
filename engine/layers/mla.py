"""Multi-head latent attention (DeepSeek-V2 report, section 2.1), this rank's heads.

Shape letters: T tokens, D model width, H this rank's heads, N nope width of a head, R rope width, C latent width,
V value width of a head, Q query latent width, X = C + R.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from engine.attention.backend import AttentionBackend
from engine.batch import ForwardBatch
from engine.comm.parallel_state import ParallelState
from engine.kernels import reference
from engine.kernels.table import Kernels
from engine.layers.linear import Linear, whole
from engine.layers.norm import RMSNorm
from engine.loading.weights import TensorSpec


class AttentionInputs(NamedTuple):
    """Query latents [T, Q] and cache rows [T, X]; where they are made already, queries absorbed [T, H, X] and expanded
    [T, H, N + R], of all rows."""

    q_TQ: torch.Tensor
    rows_TX: torch.Tensor
    absorbed_THX: torch.Tensor | None = None
    expanded_THX: torch.Tensor | None = None


class MLA(nn.Module):
    """The cache holds C + R numbers a token. Absorbed form: scores and sums are taken in the latent space; the backend
    may ask for long chunks in the expanded form. The dispatcher sums over ranks.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        norm_eps: float,
        scale: float,
        parallel: ParallelState,
        dtype: torch.dtype,
        kernels: Kernels,
    ):
        super().__init__()
        heads = parallel.split(num_heads, "attention heads")
        self.num_heads = heads.stop - heads.start
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.nope, self.rope, self.value = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.scale, self.kernels = scale, kernels
        device = parallel.device
        q_width, kv_width = self.nope + self.rope, self.nope + self.value
        q_rows = (num_heads * q_width, slice(heads.start * q_width, heads.stop * q_width))
        kv_rows = (num_heads * kv_width, slice(heads.start * kv_width, heads.stop * kv_width))
        first_q = {"q_a_proj": whole(q_lora_rank)} if q_lora_rank else {"q_proj": q_rows}
        self.qkv_a = Linear(
            hidden_size, first_q | {"kv_a_proj_with_mqa": whole(kv_lora_rank + self.rope)}, dtype, device
        )
        if q_lora_rank:
            self.q_a_layernorm = RMSNorm(q_lora_rank, norm_eps, dtype, device, kernels)
            self.q_b = Linear(q_lora_rank, {"q_b_proj": q_rows}, dtype, device)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, norm_eps, dtype, device, kernels)
        self.kv_b = Linear(kv_lora_rank, {"kv_b_proj": kv_rows}, dtype, device)
        inputs = slice(heads.start * self.value, heads.stop * self.value)
        self.o = Linear(num_heads * self.value, {"o_proj": whole(hidden_size)}, dtype, device, inputs)

    def forward(
        self, x_TD: torch.Tensor, cis: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, backend: AttentionBackend
    ) -> torch.Tensor:
        """x_TD: normalised input of all T tokens; cis: rotary angles; cache: this layer's blocks.

        Returns a partial over ranks, [T, D] or parts [P, T, D] of its sum.
        """
        inputs = self.inputs(x_TD, cis, cache, batch.slots_T)
        return self.output(self.attention(inputs, cis, cache, batch, backend))

    def inputs(
        self, x_TD: torch.Tensor, cis: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor, with_queries=False
    ) -> AttentionInputs:
        """Of normalised rows, whose KV is written to its slots. with_queries: each head's queries too, in both forms,
        since who makes them does not know yet which rows want which."""
        q_TQ, rows_TX = self.latents(x_TD, cis, cache, slots_T)
        if not with_queries:
            return AttentionInputs(q_TQ, rows_TX)
        absorbed_THX = self.absorbed(q_TQ, cis)
        return AttentionInputs(q_TQ, rows_TX, absorbed_THX, self.expanded(q_TQ, cis))

    def attention(
        self,
        inputs: AttentionInputs,
        cis: torch.Tensor,
        cache: torch.Tensor,
        batch: ForwardBatch,
        backend: AttentionBackend,
        out_THV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The heads' outputs [T, H, V], in `out_THV` where it is given."""
        outs, w_v_HVC = [], self.absorbed_weights()[1]
        for is_short, tokens, part in self._parts(batch, backend):
            made_THX = inputs.absorbed_THX if is_short else inputs.expanded_THX
            if made_THX is not None:
                q_THX = made_THX[tokens]
            else:
                q_THX = (self.absorbed if is_short else self.expanded)(inputs.q_TQ[tokens], cis[tokens])
            if is_short:
                outs.append(backend.attend(q_THX, cache, part, self.scale, w_v_HVC))
            else:
                outs.append(backend.prefill(q_THX, inputs.rows_TX[tokens], cache, part, self.scale, self.kv_b.weight))
        if out_THV is not None:
            return torch.cat(outs, out=out_THV)
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _parts(self, batch: ForwardBatch, backend: AttentionBackend) -> Iterable[tuple[bool, slice, ForwardBatch]]:
        if backend.max_absorbed_query_len is None:
            return [(True, slice(None), batch)]
        cut = backend.most_cut_queries, backend.least_cut_context
        return batch.parts(backend.max_absorbed_query_len, *cut)

    def output(self, out_THV: torch.Tensor) -> torch.Tensor:
        """This rank's heads through their columns of o_proj: a partial over ranks, [T, D] or parts [P, T, D]."""
        return self.kernels.partial(out_THV.flatten(1), self.o.weight)

    def absorbed(self, q_TQ: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        """Queries for the latent cache, [T, H, X]; the sums come back from there as [T, H, V]."""
        return self.kernels.absorbed_queries(q_TQ, self.query_weight, self.absorbed_weights()[0], cis)

    def expanded(self, q_TQ: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        """Queries for keys of each head, [T, H, N + R]; q_TQ itself, turned in place, where it holds them already."""
        return self.kernels.queries(q_TQ, self.query_weight, self.nope, cis, self.num_heads)

    def latents(
        self, x_TD: torch.Tensor, cis: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Query latents [T, Q] and cache rows [T, C + R] (normed latent, roped key of all heads), also stored."""
        q_norm = self.q_a_layernorm.weight if self.q_lora_rank else None
        kv_norm = self.kv_a_layernorm
        return self.kernels.latents(x_TD, self.qkv_a.weight, q_norm, kv_norm.weight, kv_norm.eps, cis, cache, slots_T)

    def places(self, num_rows: int, num_queries: int) -> tuple[AttentionInputs, torch.Tensor]:
        """Zeros for what attention takes and gives of so many rows, queries made for the first `num_queries`."""
        new, heads = self.o.weight.new_zeros, self.num_heads
        row = self.kv_lora_rank + self.rope
        latents = new(num_rows, self.qkv_a.weight.shape[0] - row), new(num_rows, row)
        queries = new(num_queries, heads, row), new(num_queries, heads, self.nope + self.rope)
        return AttentionInputs(*latents, *queries), new(num_rows, heads, self.value)

    @property
    def query_weight(self) -> torch.Tensor | None:
        """None where the first product made the queries already."""
        return self.q_b.weight if self.q_lora_rank else None

    def absorbed_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views W_k [H, N, C] and W_v [H, V, C] of kv_b."""
        per_head = self.kv_b.weight.unflatten(0, (self.num_heads, self.nope + self.value))
        return per_head[:, : self.nope], per_head[:, self.nope :]

    def forward_naive(self, x_TD: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        """The same for one whole sequence without a cache, keys and values expanded: the oracle of `forward`."""
        slots_T = torch.arange(x_TD.shape[0], device=x_TD.device)
        q_TQ, rows_TX = self.latents(x_TD, cis, x_TD.new_empty(1, len(slots_T), self.kv_lora_rank + self.rope), slots_T)
        q_THX = self.expanded(q_TQ, cis)
        latent_TC, key_rope_TR = rows_TX.split([self.kv_lora_rank, self.rope], dim=-1)
        kv_THX = self.kernels.linear(latent_TC, self.kv_b.weight).unflatten(-1, (self.num_heads, -1))
        keys_THX = torch.cat(
            [kv_THX[..., : self.nope], key_rope_TR.unsqueeze(1).expand(-1, self.num_heads, -1)], dim=-1
        )
        return self.output(reference.mla_naive(q_THX, keys_THX, kv_THX[..., self.nope :], self.scale))

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        specs = self.qkv_a.specs(prefix) | self.kv_b.specs(prefix) | self.o.specs(prefix)
        specs |= self.kv_a_layernorm.specs(f"{prefix}kv_a_layernorm")
        if self.q_lora_rank:
            specs |= self.q_a_layernorm.specs(f"{prefix}q_a_layernorm") | self.q_b.specs(prefix)
        return specs
