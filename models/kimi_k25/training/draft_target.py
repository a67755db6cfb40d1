"""The tiny checkpoint as the target of draft training: fast batched generation, features of whole sequences.

Shape letters: B sequences, Q new tokens of each, S positions, D width, H heads, C latent + rope width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.kimi_k25.training.model import LatentAttention, MoE, rotate
from models.kimi_k25.training.stored import load_stored

Attend = Callable[[int, LatentAttention, Tensor], Tensor]
PREFILL_SCORES = 2**29
WIDTH_STEP = 32
COMPACT_EVERY, COMPACT_SHARE = 16, 0.75


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


class DraftTarget:
    """The stored checkpoint, float32 on the CPU and BF16 on a GPU, experts with their INT4 values.

    embedding, head: [V, D] weights. final_norm: [D].
    """

    def __init__(self, folder: Path, device: torch.device):
        model = load_stored(folder, causal_attention)
        self.a = model.a
        self.inv_freq = model.inv_freq.to(device)
        self._routers = [moe.gate.detach().to(device) for moe in model.moe_layers()]
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        biases = [moe.correction_bias.to(device) for moe in model.moe_layers()]
        self.model = model.to(device, self.dtype).requires_grad_(False)
        for moe, router, bias in zip(model.moe_layers(), self._routers, biases, strict=True):
            moe.gate.data, moe.correction_bias = router, bias
            moe.wide_down = moe.experts_down.transpose(1, 2).flatten(0, 1).t().contiguous()
        self.device = device
        self.embedding, self.head = model.embed_tokens.weight, model.lm_head.weight
        self.final_norm = model.norm.weight
        self.stop_ids = [self.a.special_id(name) for name in ("<|im_end|>", "[EOS]", "[EOT]")]
        self.special_ids = list(range(self.a.vocab_size - 256, self.a.vocab_size - 256 + 24))
        self.num_layers, self.vocab_size, self.width = self.a.num_hidden_layers, self.a.vocab_size, self.a.hidden_size
        self.max_positions, self.eps = self.a.max_position_embeddings, self.a.rms_norm_eps

    @torch.no_grad()
    def features(self, ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """ids [B, S] -> (the residual streams entering `layers` side by side [B, S, len(layers) * D], the final normed
        hidden states [B, S, D]). What follows a position does not reach it, so padding belongs on the right."""
        angles = torch.arange(ids.shape[1], device=ids.device).float().outer(self.inv_freq)
        cos, sin = angles.cos(), angles.sin()
        captured: dict[int, Tensor] = {}
        hidden = self._run(ids, lambda i, attention, x: attention(x, cos, sin, None), captured)
        return torch.cat([captured[layer] for layer in layers], -1), hidden

    def _run(self, ids: Tensor, attend: Attend, captured: dict[int, Tensor] | None = None) -> Tensor:
        x = self.model.embed_tokens(ids)
        for i, layer in enumerate(self.model.layers):
            if captured is not None:
                captured[i] = x
            x = x + attend(i, layer.self_attn, layer.input_layernorm(x))
            normed = layer.post_attention_layernorm(x)
            x = x + (_experts(layer.mlp, normed) if layer.is_moe else layer.mlp(normed))
        if captured is not None:
            captured[self.num_layers] = x
        return self.model.norm(x)

    @torch.no_grad()
    def generate(
        self, prompts: list[np.ndarray], max_new: int, temperatures: Sequence[float], seed: int
    ) -> list[np.ndarray]:
        """The target's continuation of every prompt, with the stop token that ended it; temperature 0 is greedy."""
        return _Generation(self, prompts, max_new, temperatures, seed).run()

    def attend_cached(self, attention: LatentAttention, x: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
        """Absorbed MLA of x [B, Q, D] at positions [B, Q] over cache [B, S, C], into which the new entries go."""
        a, heads = self.a, self.a.num_attention_heads
        angles = positions.unsqueeze(-1).float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x))).unflatten(-1, (heads, -1))
        q_nope, q_rope = q.split((a.qk_nope_head_dim, a.qk_rope_head_dim), -1)
        latent, k_rope = attention.kv_a_proj_with_mqa(x).split((a.kv_lora_rank, a.qk_rope_head_dim), -1)
        entries = torch.cat((attention.kv_a_layernorm(latent), rotate(k_rope, cos, sin)), -1)
        cache[torch.arange(len(x), device=x.device).unsqueeze(1), positions] = entries
        kv_b = attention.kv_b_proj.weight.unflatten(0, (heads, -1))
        w_k, w_v = kv_b.split((a.qk_nope_head_dim, a.v_head_dim), 1)
        q_latent = torch.einsum("bqhn,hnc->bqhc", q_nope, w_k)
        q = torch.cat((q_latent, rotate(q_rope, cos.unsqueeze(2), sin.unsqueeze(2))), -1).flatten(1, 2)
        scores = torch.bmm(q, cache.transpose(1, 2)).float() * attention.scale
        unseen = torch.arange(cache.shape[1], device=x.device) > positions.unsqueeze(-1)
        scores.masked_fill_(unseen.repeat_interleave(heads, 1), float("-inf"))
        out = torch.bmm(scores.softmax(-1).to(cache.dtype), cache[..., : a.kv_lora_rank])
        out = torch.einsum("bqhc,hvc->bqhv", out.unflatten(1, (-1, heads)), w_v)
        return attention.o_proj(out.flatten(-2))

    def step(self, ids: Tensor, positions: Tensor, caches: list[Tensor], width: int) -> Tensor:
        """Normed hidden states [B, Q, D] of new tokens; `width`: cached positions that can matter."""
        return self._run(ids, lambda i, att, x: self.attend_cached(att, x, positions, caches[i][:, :width]))


def _experts(moe: MoE, x: Tensor) -> Tensor:
    """What `MoE.forward` computes, without its fake quantisation: the weights are INT4's values already."""
    weights, _ = moe.route(x)
    hidden = F.silu(F.linear(x, moe.experts_gate.flatten(0, 1))) * F.linear(x, moe.experts_up.flatten(0, 1))
    hidden = hidden.unflatten(-1, (moe.a.n_routed_experts, -1)) * weights.to(hidden.dtype).unsqueeze(-1)
    return F.linear(hidden.flatten(-2), moe.wide_down) + moe.shared_experts(x)


class _Generation:
    """One batch of prompts on its way; rows that have ended are dropped from time to time."""

    def __init__(self, target: DraftTarget, prompts: list[np.ndarray], max_new: int, temperatures, seed: int):
        self.target, self.max_new, device = target, max_new, target.device
        self.lengths = torch.tensor([len(p) for p in prompts], device=device)
        self.temperatures = torch.as_tensor(temperatures, dtype=torch.float32, device=device)
        self.stops = torch.tensor(target.stop_ids, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.longest = int(self.lengths.max())
        self.ids = torch.zeros(len(prompts), self.longest, dtype=torch.int64)
        for row, prompt in zip(self.ids, prompts, strict=True):
            row[: len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        self.ids = self.ids.to(device)
        width = -(-(self.longest + max_new) // WIDTH_STEP) * WIDTH_STEP
        entry = target.a.kv_lora_rank + target.a.qk_rope_head_dim
        shape = (len(prompts), width, entry)
        # Zeros, not empty: unseen entries are multiplied by a weight of 0, and NaN times 0 is NaN.
        self.caches = [torch.zeros(shape, dtype=target.dtype, device=device) for _ in range(target.num_layers)]
        self.out = torch.full((len(prompts), max_new), -1, dtype=torch.int64, device=device)
        self.rows = torch.arange(len(prompts), device=device)
        self.running = torch.ones(len(prompts), dtype=torch.bool, device=device)

    def run(self) -> list[np.ndarray]:
        self.tokens = self._sample(self._prefill())
        for index in range(self.max_new):
            self.out[self.rows, index] = torch.where(self.running, self.tokens, -1)
            self.running &= ~torch.isin(self.tokens, self.stops)
            if index + 1 == self.max_new or (index % COMPACT_EVERY == 0 and not self._compact()):
                break
            positions = (self.lengths + index).unsqueeze(1)
            width = min(-(-(self.longest + index + 1) // WIDTH_STEP) * WIDTH_STEP, self.caches[0].shape[1])
            hidden = self.target.step(self.tokens.unsqueeze(1), positions, self.caches, width)
            self.tokens = self._sample(hidden[:, 0])
        return [row[row >= 0].astype(np.uint16) for row in self.out.cpu().numpy()]

    def _prefill(self) -> Tensor:
        """Hidden states [B, D] of the last prompt tokens; some rows at a time, for the scores' sake."""
        heads, last = self.target.a.num_attention_heads, []
        rows = max(1, PREFILL_SCORES // (heads * self.longest**2))
        positions = torch.arange(self.longest, device=self.ids.device)
        for start in range(0, len(self.ids), rows):
            part = slice(start, start + rows)
            ids = self.ids[part]
            caches = [cache[part] for cache in self.caches]
            hidden = self.target.step(ids, positions.expand(len(ids), -1), caches, self.longest)
            last.append(hidden[torch.arange(len(ids), device=ids.device), self.lengths[part] - 1])
        return torch.cat(last)

    def _sample(self, hidden: Tensor) -> Tensor:
        """The most likely token where the temperature is 0, else one drawn by Gumbel noise."""
        logits = F.linear(hidden, self.target.head).float()
        noise = -torch.empty_like(logits).exponential_(generator=self.generator).clamp_min_(1e-20).log()
        return (logits + noise * self.temperatures.unsqueeze(1)).argmax(-1)

    def _compact(self) -> bool:
        """Drops ended rows once they are many; False when all have ended."""
        left = int(self.running.sum())
        if left and left < COMPACT_SHARE * len(self.running):
            kept = self.running.nonzero().squeeze(1)
            self.caches = [cache.index_select(0, kept) for cache in self.caches]
            for name in ("lengths", "temperatures", "rows", "running", "tokens"):
                setattr(self, name, getattr(self, name)[kept])
            self.longest = int(self.lengths.max())
        return left > 0


def load_target(folder: Path, device: torch.device) -> DraftTarget:
    """What `python -m draft.eagle3.training.train --target` names."""
    return DraftTarget(folder, device)
