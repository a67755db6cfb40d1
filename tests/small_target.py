"""A target of the training code, small enough to train and to run within a test."""

from __future__ import annotations

from models.kimi_k25.training.architecture import Architecture

SMALL = Architecture(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=3,
    intermediate_size=96,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
