"""Planted faults: the oracle with one of the well-known mistakes of this architecture built in.

Each entry takes a checkpoint directory and returns a transformers model that makes the mistake. A comparison that holds
against the true oracle and would fail against every one of these has seen all of them.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path

import torch

from tests import oracle


def _attentions(model) -> list:
    return [layer.self_attn for layer in model.model.layers]


def low_rank_epsilon(directory: Path):
    """Trap 1: the epsilon of the two low-rank norms taken from rms_norm_eps (1e-5)."""
    model = oracle.deepseek_v3(directory)
    for norm in oracle.low_rank_norms(model):
        norm.variance_epsilon = 1e-5
    return model


def plain_softmax_scale(directory: Path):
    """Trap 2: one over the root of the head size, without YaRN's squared mscale."""
    model = oracle.deepseek_v3(directory)
    for attention in _attentions(model):
        attention.scaling = attention.qk_head_dim**-0.5
    return model


def scaled_cos_sin(directory: Path):
    """Trap 2: mscale applied to cos and sin as well."""
    model = oracle.deepseek_v3(directory)
    model.model.rotary_emb.attention_scaling = 1.4158883083
    return model


def half_split_rope(directory: Path):
    """Trap 3: rotation of (i, i + d/2) in place of (2i, 2i + 1)."""
    model = oracle.deepseek_v3(directory)
    model.config.rope_interleave = False
    return model


def beta_fast_one(directory: Path):
    """Trap 4: the beta_fast of the older K2 checkpoints."""
    model = oracle.deepseek_v3(directory)
    config = copy.deepcopy(model.config)
    config.rope_parameters["beta_fast"] = 1.0
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def twos_complement_nibbles(directory: Path):
    """Trap 5: nibbles read as signed numbers, not as value + 8."""

    def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return oracle.unpack_int4(packed ^ -0x77777778, scale)  # flips bit 3 of every nibble

    return oracle.deepseek_v3(directory, unpack)


def reversed_nibbles(directory: Path):
    """Trap 5: the highest nibble taken for the lowest column."""

    def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        words = sum(((packed.long() >> (4 * k)) & 15) << (4 * (7 - k)) for k in range(8))
        return oracle.unpack_int4(words, scale)

    return oracle.deepseek_v3(directory, unpack)


def _with_router(directory: Path, choose: Callable, weigh: Callable):
    """A plain router with its own selection key and its own weights, both from (scores [T, E], bias [E])."""

    def forward(self, hidden_states: torch.Tensor):
        x = hidden_states.reshape(-1, self.hidden_dim).float()
        logits = x @ self.weight.float().T
        scores = logits.sigmoid()
        ids = choose(scores, self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = weigh(scores, self.e_score_correction_bias).gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor
        return logits, weights, ids

    model = oracle.deepseek_v3(directory)
    for router in oracle.routers(model):
        router.forward = types.MethodType(forward, router)
    return model


def plain_router(directory: Path):
    """No fault: the formula of the router in one line each, one group; it must equal the oracle."""
    return _with_router(directory, lambda s, b: s + b, lambda s, b: s)


def bias_ignored(directory: Path):
    return _with_router(directory, lambda s, b: s, lambda s, b: s)


def bias_in_weights(directory: Path):
    return _with_router(directory, lambda s, b: s + b, lambda s, b: s + b)


def bias_in_bf16(directory: Path):
    return _with_router(directory, lambda s, b: (s + b).bfloat16().float(), lambda s, b: s)


def no_routed_scaling(directory: Path):
    model = oracle.deepseek_v3(directory)
    for router in oracle.routers(model):
        router.routed_scaling_factor = 1.0
    return model


def shared_expert_scaled(directory: Path):
    """The routed scaling factor applied to the shared expert too."""
    model = oracle.deepseek_v3(directory)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "shared_experts"):
            layer.mlp.shared_experts.down_proj.weight.data *= 2.827
    return model


FAULTS = {
    "trap_1_low_rank_epsilon": low_rank_epsilon,
    "trap_2_plain_softmax_scale": plain_softmax_scale,
    "trap_2_scaled_cos_sin": scaled_cos_sin,
    "trap_3_half_split_rope": half_split_rope,
    "trap_4_beta_fast_one": beta_fast_one,
    "trap_5_twos_complement_nibbles": twos_complement_nibbles,
    "trap_5_reversed_nibbles": reversed_nibbles,
    "router_bias_ignored": bias_ignored,
    "router_bias_in_weights": bias_in_weights,
    "router_bias_in_bf16": bias_in_bf16,
    "router_without_scaling": no_routed_scaling,
    "shared_expert_scaled": shared_expert_scaled,
}
