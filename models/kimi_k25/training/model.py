"""The training model: Kimi-K2.5's text architecture in plain PyTorch, every expert computed and masked by the router.

Expanded ("naive") MLA, YaRN RoPE on interleaved pairs, sigmoid router with a correction bias. The engine's own model
is a separate implementation; a test holds both against transformers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.kimi_k25.training.architecture import Architecture
from models.kimi_k25.training.attention import Attention, AttentionMask
from models.kimi_k25.training.quantization import fake_quantize


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


def rope_frequencies(a: Architecture) -> Tensor:
    """YaRN's inverse frequencies, [rope dim / 2] float32."""
    dim, base = a.qk_rope_head_dim, a.rope_theta
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def pair_index(rotations: float) -> float:
        turns = a.original_max_position_embeddings / (2 * math.pi * rotations)
        return dim * math.log(turns) / (2 * math.log(base))

    low, high = math.floor(pair_index(a.beta_fast)), math.ceil(pair_index(a.beta_slow))
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (1 - ramp) * plain + ramp * plain / a.rope_factor


def softmax_scale(a: Architecture) -> float:
    """head_dim^-0.5 times YaRN's mscale squared."""
    mscale = 0.1 * a.mscale_all_dim * math.log(a.rope_factor) + 1.0
    return a.qk_head_dim**-0.5 * mscale**2


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (2i, 2i+1) of [..., S, dim] by tables [S, dim / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class LatentAttention(nn.Module):
    def __init__(self, a: Architecture, attention: Attention):
        super().__init__()
        self.a, self.attention, self.scale = a, attention, softmax_scale(a)
        heads = a.num_attention_heads
        self.q_a_proj = nn.Linear(a.hidden_size, a.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(a.q_lora_rank, a.low_rank_norm_eps)
        self.q_b_proj = nn.Linear(a.q_lora_rank, heads * a.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(a.hidden_size, a.kv_lora_rank + a.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(a.kv_lora_rank, a.low_rank_norm_eps)
        self.kv_b_proj = nn.Linear(a.kv_lora_rank, heads * (a.qk_nope_head_dim + a.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * a.v_head_dim, a.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask) -> Tensor:
        a, heads = self.a, self.a.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split((a.qk_nope_head_dim, a.qk_rope_head_dim), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((a.kv_lora_rank, a.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1)).transpose(1, 2)
        k_nope, v = kv.split((a.qk_nope_head_dim, a.v_head_dim), -1)
        k_rope = rotate(k_rope, cos, sin).unsqueeze(1).expand(-1, heads, -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1)
        k = torch.cat((k_nope, k_rope.to(k_nope.dtype)), -1)
        out = self.attention(q.to(v.dtype), k, v, mask, self.scale)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """All experts as one wide MLP whose hidden values are scaled by the router's weights, 0 for those not chosen."""

    def __init__(self, a: Architecture):
        super().__init__()
        self.a = a
        experts, hidden, width = a.n_routed_experts, a.moe_intermediate_size, a.hidden_size
        self.gate = nn.Parameter(torch.empty(experts, width))
        self.experts_gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.experts_up = nn.Parameter(torch.empty(experts, hidden, width))
        self.experts_down = nn.Parameter(torch.empty(experts, width, hidden))
        self.shared_experts = MLP(width, hidden * a.n_shared_experts)
        self.register_buffer("correction_bias", torch.zeros(experts))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, chosen), both [..., experts] float32; chosen is 1 for the top experts by score + bias."""
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.gate))
            top = (scores + self.correction_bias).detach().topk(self.a.num_experts_per_tok, dim=-1).indices
            chosen = torch.zeros_like(scores).scatter(-1, top, 1.0)
            weights = scores * chosen
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.a.routed_scaling_factor
        return weights, chosen

    def forward(self, x: Tensor, int4: Tensor) -> tuple[Tensor, Tensor]:
        """(output, tokens per expert [experts])."""
        weights, chosen = self.route(x)
        gate = fake_quantize(self.experts_gate, int4).flatten(0, 1)
        up = fake_quantize(self.experts_up, int4).flatten(0, 1)
        down = fake_quantize(self.experts_down, int4).transpose(1, 2).flatten(0, 1)
        hidden = F.silu(F.linear(x, gate)) * F.linear(x, up)
        hidden = hidden.unflatten(-1, (self.a.n_routed_experts, -1))
        hidden = (hidden * weights.to(hidden.dtype).unsqueeze(-1)).flatten(-2)
        return F.linear(hidden, down.t()) + self.shared_experts(x), chosen.flatten(0, -2).sum(0)


class Layer(nn.Module):
    def __init__(self, a: Architecture, index: int, attention: Attention):
        super().__init__()
        self.input_layernorm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.self_attn = LatentAttention(a, attention)
        self.post_attention_layernorm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.is_moe = index >= a.first_k_dense_replace
        self.mlp = MoE(a) if self.is_moe else MLP(a.hidden_size, a.intermediate_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask, int4: Tensor, drop: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        x = x + self._dropped(self.self_attn(self.input_layernorm(x), cos, sin, mask), drop)
        normed = self.post_attention_layernorm(x)
        if not self.is_moe:
            return x + self._dropped(self.mlp(normed), drop), None
        out, load = self.mlp(normed, int4)
        return x + self._dropped(out, drop), load

    def _dropped(self, x: Tensor, drop: Tensor) -> Tensor:
        """Dropout with its rate in a tensor, so that changing the rate does not compile the model anew."""
        if not self.training:
            return x
        return x * (torch.rand_like(x, dtype=torch.float32) >= drop).to(x.dtype) / (1 - drop).to(x.dtype)


class TinyKimi(nn.Module):
    """Token ids [B, S] -> final hidden states [B, S, width] (normed) and the tokens per expert of each MoE layer."""

    def __init__(self, a: Architecture, attention: Attention):
        super().__init__()
        self.a = a
        self.embed_tokens = nn.Embedding(a.vocab_size, a.hidden_size)
        self.layers = nn.ModuleList(Layer(a, i, attention) for i in range(a.num_hidden_layers))
        self.norm = RMSNorm(a.hidden_size, a.rms_norm_eps)
        self.lm_head = nn.Linear(a.hidden_size, a.vocab_size, bias=False)
        self.register_buffer("inv_freq", rope_frequencies(a), persistent=False)
        self.register_buffer("int4", torch.tensor(0.0), persistent=False)
        self.register_buffer("drop", torch.tensor(0.0), persistent=False)

    def initialise(self, seed: int) -> None:
        """Normal weights of std fan_in^-0.5, smaller where a branch writes into the residual stream.

        Embeddings of std 1 keep tokens apart at the first layers, or the router sends all to the same experts.
        """
        generator = torch.Generator().manual_seed(seed)
        residual = (2 * self.a.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            std = weight.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts_down")):
                std *= residual
            if "embed_tokens" in name or "lm_head" in name:
                std = 1.0 if "embed" in name else 0.02
            with torch.no_grad():
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    def forward(self, ids: Tensor, mask: AttentionMask) -> tuple[Tensor, list[Tensor]]:
        angles = torch.arange(ids.shape[1], device=ids.device).float().outer(self.inv_freq)
        cos, sin = angles.cos(), angles.sin()
        x, loads = self.embed_tokens(ids), []
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        for layer in self.layers:
            x, load = layer(x, cos, sin, mask, self.int4, self.drop)
            if load is not None:
                loads.append(load)
        return self.norm(x), loads

    def moe_layers(self) -> list[MoE]:
        return [layer.mlp for layer in self.layers if layer.is_moe]

    @torch.no_grad()
    def balance(self, loads: list[Tensor], rate: float) -> None:
        """Loss-free balancing: a busy expert's bias goes down by `rate`, an idle one's up."""
        for moe, load in zip(self.moe_layers(), loads, strict=True):
            moe.correction_bias += rate * torch.sign(load.mean() - load)


def token_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each position in nats, [B * S] float32; 0 where the target is -100."""
    logits = F.linear(hidden.flatten(0, 1), head.to(hidden.dtype))
    return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=-100, reduction="none")
