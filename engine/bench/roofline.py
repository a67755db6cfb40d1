"""Bytes and FLOPs that a step of one rank cannot do without, from the model's sizes alone.

Weights count as the checkpoint stores them (bfloat16; routed experts INT4 in groups of 32 with bfloat16 scales),
whatever the engine holds, so that a fraction of the roofline compares engines. Activations are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BYTES = 2  # bfloat16
INT4_BYTES = 0.5 + BYTES / 32


@dataclass(frozen=True)
class ShareSizes:
    """Parameters of one rank of a world of `tp` ranks with `ep` expert groups; `config` is a KimiConfig."""

    config: Any
    tp: int
    ep: int

    @property
    def replicated_attention(self) -> int:
        """Parameters of a layer's attention that every rank holds whole: the first products of queries and latents."""
        c = self.config
        return c.hidden_size * ((c.q_lora_rank or 0) + c.kv_lora_rank + c.qk_rope_head_dim)

    @property
    def attention(self) -> int:
        c = self.config
        query_width = c.q_lora_rank or c.hidden_size
        per_head = query_width * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        per_head += c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim) + c.v_head_dim * c.hidden_size
        return self.replicated_attention + per_head * c.num_attention_heads // self.tp

    @property
    def router(self) -> int:
        return self.config.n_routed_experts * self.config.hidden_size

    @property
    def shared(self) -> int:
        c = self.config
        return 3 * c.hidden_size * c.moe_intermediate_size * c.n_shared_experts // self.tp

    @property
    def expert(self) -> int:
        """This rank's part of one routed expert."""
        return 3 * self.config.hidden_size * self.config.moe_intermediate_size * self.ep // self.tp

    @property
    def dense(self) -> int:
        return 3 * self.config.hidden_size * self.config.intermediate_size // self.tp

    @property
    def head(self) -> int:
        """The LM head; the embedding is as large."""
        return self.config.vocab_size * self.config.hidden_size // self.tp

    @property
    def moe_layers(self) -> int:
        return max(self.config.num_hidden_layers - self.config.first_k_dense_replace, 0)

    @property
    def fixed(self) -> int:
        """Parameters that every step reads, routed experts and the embedding's rows left out."""
        c = self.config
        dense_layers = c.num_hidden_layers - self.moe_layers
        moe = self.moe_layers * (self.shared + self.router)
        return c.num_hidden_layers * self.attention + dense_layers * self.dense + moe + self.head

    @property
    def expert_bytes(self) -> float:
        per_number = INT4_BYTES if self.config.is_quantized else BYTES
        return self.expert * per_number

    @property
    def token_bytes(self) -> int:
        """Of a token in one layer's KV cache, the same on every rank."""
        return (self.config.kv_lora_rank + self.config.qk_rope_head_dim) * BYTES

    def total_bytes(self) -> float:
        """All weights of the rank."""
        experts = self.moe_layers * self.config.n_routed_experts // self.ep
        return (self.fixed + self.head) * BYTES + experts * self.expert_bytes

    def weight_bytes(self, distinct_experts: int) -> float:
        """What a decode step reads of the weights; `distinct_experts`: summed over layers, each counted once."""
        return self.fixed * BYTES + distinct_experts * self.expert_bytes

    def kv_bytes(self, num_tokens: int) -> int:
        """What attention reads of the cache for `num_tokens` tokens of context, all requests together."""
        return num_tokens * self.token_bytes * self.config.num_hidden_layers

    def prefill_flops(self, num_tokens: int, expert_rows: int) -> float:
        """Model FLOPs of the rank for one fresh prompt, a multiply and an add for each weight a token passes.

        expert_rows: (token, expert) pairs of this rank, summed over layers. Attention in its expanded form, causal:
        2 * (nope + rope + value) FLOPs a head for each of T (T + 1) / 2 pairs a layer. The head computes one row.
        """
        c = self.config
        dense = 2 * (self.fixed - self.head) * num_tokens + 2 * self.head
        pairs = c.num_hidden_layers * num_tokens * (num_tokens + 1) / 2
        width = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
        return dense + 2 * self.expert * expert_rows + 2 * width * pairs * c.num_attention_heads / self.tp
