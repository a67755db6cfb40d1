"""The draft's attention in its two steps: keys and values of all rows into the cache, then one query a request.

Shape letters: T rows, N requests, I input width (2 D), D draft width, H this rank's heads, G its key heads, d width of
a head, V that of its values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from draft.eagle3.config import Eagle3Config, FullHeads, LatentHeads
from draft.eagle3.zeros import Zeros
from engine.attention.backend import AttentionBackend
from engine.batch import ForwardBatch
from engine.comm.parallel_state import ParallelState, even_slice
from engine.kernels.table import Kernels
from engine.layers.linear import Linear, whole
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding, softmax_scale
from engine.loading.weights import TensorSpec


class DraftAttention(Protocol):
    """cache_width: numbers a token in the cache, of this rank. is_capturable: both steps may be captured in a graph."""

    cache_width: int
    is_capturable: bool

    def write(self, x_TI: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor) -> None:
        """Puts keys and values of the batch's rows into their slots."""

    def attend(self, x_NI: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor:
        """One row a request over what is written: a partial over ranks, [N, D] or parts [P, N, D] of its sum."""

    def specs(self, prefix: str) -> dict[str, TensorSpec]: ...


class LatentAttention(nn.Module):
    """MLA in the absorbed form. Unlike the target's, query and key projections are apart: most rows need no query."""

    def __init__(
        self,
        config: Eagle3Config,
        heads: LatentHeads,
        parallel: ParallelState,
        dtype: torch.dtype,
        kernels: Kernels,
        backend: AttentionBackend,
    ):
        super().__init__()
        self.heads, self.kernels, self.backend = heads, kernels, backend
        self.is_capturable = kernels.is_capturable and backend.is_capturable
        self.zeros = Zeros(dtype, parallel.device)
        own = parallel.split(heads.num_heads, "attention heads of the draft")
        self.num_heads = own.stop - own.start
        self.cache_width = heads.kv_lora_rank + heads.qk_rope_head_dim
        width, device = 2 * config.hidden_size, parallel.device
        q_width = heads.qk_nope_head_dim + heads.qk_rope_head_dim
        kv_width = heads.qk_nope_head_dim + heads.v_head_dim
        self.scale = softmax_scale(q_width, config.rope)
        self.rotary = RotaryEmbedding(heads.qk_rope_head_dim, config.rope, device, kernels)
        q_rows, kv_rows = _rows(own, heads.num_heads, q_width), _rows(own, heads.num_heads, kv_width)
        rank = heads.q_lora_rank
        self.q_a = Linear(width, {"q_a_proj": whole(rank)} if rank else {"q_proj": q_rows}, dtype, device)
        if rank:
            self.q_a_layernorm = RMSNorm(rank, heads.norm_eps, dtype, device, kernels)
            self.q_b = Linear(rank, {"q_b_proj": q_rows}, dtype, device)
        self.kv_a = Linear(width, {"kv_a_proj_with_mqa": whole(self.cache_width)}, dtype, device)
        self.kv_a_layernorm = RMSNorm(heads.kv_lora_rank, heads.norm_eps, dtype, device, kernels)
        self.kv_b = Linear(heads.kv_lora_rank, {"kv_b_proj": kv_rows}, dtype, device)
        inputs = slice(own.start * heads.v_head_dim, own.stop * heads.v_head_dim)
        out = {"o_proj": whole(config.hidden_size)}
        self.o = Linear(heads.num_heads * heads.v_head_dim, out, dtype, device, inputs)

    def write(self, x_TI: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor) -> None:
        cis, norm = self.rotary(batch.positions_T), self.kv_a_layernorm
        self.kernels.latents(x_TI, self.kv_a.weight, None, norm.weight, norm.eps, cis, cache, batch.slots_T)

    def attend(self, x_NI: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor:
        per_head = self.kv_b.weight.unflatten(0, (self.num_heads, -1))
        nope = self.heads.qk_nope_head_dim
        if self.heads.q_lora_rank:  # few outputs of many inputs: parts of the sum, which the norm adds up
            parts = self.kernels.partial(x_NI, self.q_a.weight)
            zeros_NQ = self.zeros(x_NI.shape[0], self.heads.q_lora_rank)
            (q_NQ, _), weight = self.q_a_layernorm.add(parts, zeros_NQ), self.q_b.weight
        else:
            q_NQ, weight = self.kernels.linear(x_NI, self.q_a.weight), None
        q_NHX = self.kernels.absorbed_queries(q_NQ, weight, per_head[:, :nope], self.rotary(batch.positions_T))
        out_NHV = self.backend.attend(q_NHX, cache, batch, self.scale, per_head[:, nope:])
        return self.kernels.partial(out_NHV.flatten(1), self.o.weight)

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        specs = self.q_a.specs(prefix) | self.kv_a.specs(prefix) | self.kv_b.specs(prefix) | self.o.specs(prefix)
        specs |= self.kv_a_layernorm.specs(f"{prefix}kv_a_layernorm")
        if self.heads.q_lora_rank:
            specs |= self.q_a_layernorm.specs(f"{prefix}q_a_layernorm") | self.q_b.specs(prefix)
        return specs


class FullAttention(nn.Module):
    """Llama's: keys and values of each head in the cache. Where there are fewer key heads than ranks, ranks whose
    queries read the same one each hold it."""

    def __init__(
        self,
        config: Eagle3Config,
        heads: FullHeads,
        parallel: ParallelState,
        dtype: torch.dtype,
        kernels: Kernels,
    ):
        super().__init__()
        self.heads, self.kernels = heads, kernels
        self.is_capturable = kernels.is_capturable
        own = parallel.split(heads.num_heads, "attention heads of the draft")
        own_kv = _key_heads(heads.num_kv_heads, parallel)
        self.num_heads, self.num_kv_heads = own.stop - own.start, own_kv.stop - own_kv.start
        self.cache_width = 2 * self.num_kv_heads * heads.head_dim
        self.scale = heads.head_dim**-0.5  # yarn's temperature is in cos and sin here
        width, device = 2 * config.hidden_size, parallel.device
        self.rotary = RotaryEmbedding(heads.head_dim, config.rope, device, kernels)
        kv_rows = _rows(own_kv, heads.num_kv_heads, heads.head_dim)
        self.q = Linear(width, {"q_proj": _rows(own, heads.num_heads, heads.head_dim)}, dtype, device)
        self.kv = Linear(width, {"k_proj": kv_rows, "v_proj": kv_rows}, dtype, device)
        inputs = slice(own.start * heads.head_dim, own.stop * heads.head_dim)
        out = {"o_proj": whole(config.hidden_size)}
        self.o = Linear(heads.num_heads * heads.head_dim, out, dtype, device, inputs)

    def write(self, x_TI: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor) -> None:
        kv_TGd = self.kernels.linear(x_TI, self.kv.weight).unflatten(1, (2 * self.num_kv_heads, -1))
        k_TGd, v_TGd = kv_TGd.chunk(2, dim=1)
        k_TGd = self.kernels.rotate_halves(k_TGd, self.rotary(batch.positions_T))
        self.kernels.store_heads(cache, k_TGd, v_TGd, batch.slots_T)

    def attend(self, x_NI: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor) -> torch.Tensor:
        q_NHd = self.kernels.linear(x_NI, self.q.weight).unflatten(1, (self.num_heads, -1))
        q_NHd = self.kernels.rotate_halves(q_NHd, self.rotary(batch.positions_T))
        out_NHd = self.kernels.attend_heads(q_NHd, cache, batch.block_table_NB, batch.seq_lens_N, self.scale)
        return self.kernels.partial(out_NHd.flatten(1), self.o.weight)

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        return self.q.specs(prefix) | self.kv.specs(prefix) | self.o.specs(prefix)


def attention(
    config: Eagle3Config, parallel: ParallelState, dtype: torch.dtype, kernels: Kernels, backend: AttentionBackend
) -> LatentAttention | FullAttention:
    """Raises ValueError with the sum where the heads do not divide over the ranks."""
    if isinstance(config.heads, LatentHeads):
        return LatentAttention(config, config.heads, parallel, dtype, kernels, backend)
    return FullAttention(config, config.heads, parallel, dtype, kernels)


def _rows(heads: slice, num_heads: int, width: int) -> tuple[int, slice]:
    """A part of a Linear: these heads' outputs among all."""
    return num_heads * width, slice(heads.start * width, heads.stop * width)


def _key_heads(num_kv_heads: int, parallel: ParallelState) -> slice:
    what = f"key heads of the draft (tp={parallel.tp})"
    if num_kv_heads >= parallel.tp or parallel.tp % num_kv_heads:
        return even_slice(num_kv_heads, parallel.tp, parallel.rank, what)
    index = parallel.rank // (parallel.tp // num_kv_heads)
    return slice(index, index + 1)
