"""The draft as training runs it: one Llama layer unrolled over several guesses (training-time test).

Parameters bear the names of the checkpoint (SafeAILab's). At step i the layer reads, for each position t, the token
t + 1 + i and at step 0 the target's features of token t, later its own output of the step before; it predicts token
t + 2 + i. A step's query attends to step 0's keys up to t and to its own row of the later steps, as it would to a cache
that holds real features of the past and the draft's own states of the tail.

Shape letters: B sequences, S positions, D width, F features, H heads, E head width, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft; `feature_layers`: target layers whose entering states it reads."""

    vocab_size: int
    width: int
    draft_vocab_size: int = 2048
    heads: int = 8
    head_width: int = 32
    mlp_width: int = 768
    feature_layers: tuple[int, ...] = (1, 2, 4)
    rope_theta: float = 10000.0
    max_positions: int = 4096
    eps: float = 1e-5


class RMSNorm(nn.Module):
    """Computed in float32, returned in the input's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_f32 = x.float()
        normed = x_f32 * torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


def rope_tables(shape: DraftShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of `positions` [...], each [..., E] float32, the halves alike."""
    exponents = torch.arange(0, shape.head_width, 2, device=positions.device).float() / shape.head_width
    angles = positions.float().unsqueeze(-1) * shape.rope_theta**-exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE over halves of [B, H, S, E] by tables [S, E]."""
    cos, sin = tables
    low, high = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: DraftShape):
        super().__init__()
        self.shape = shape
        inner = shape.heads * shape.head_width
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(2 * shape.width, inner, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(inner, shape.width, bias=False)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, 2 D], positions [S] -> q, k, v, each [B, H, S, E]."""
        heads = (self.shape.heads, self.shape.head_width)
        q, k, v = (p(x).unflatten(-1, heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        tables = rope_tables(self.shape, positions)
        return rotate(q, tables).to(v.dtype), rotate(k, tables).to(v.dtype), v

    def output(self, mixed: Tensor) -> Tensor:
        """[B, H, S, E] -> [B, S, D]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], seen: Tensor) -> Tensor:
    """Attention over step 0's keys where `seen` [S, S] and over the own row of the later steps'; all [B, H, S, E]."""
    length, scale = q.shape[2], q.shape[-1] ** -0.5
    scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))
    own = [(q.float() * k.float()).sum(-1, keepdim=True) for k in keys[1:]]
    weights = (torch.cat((scores, *own), -1) * scale).softmax(-1).to(q.dtype)
    mixed = weights[..., :length] @ values[0]
    for step, value in enumerate(values[1:]):
        mixed = mixed + weights[..., length + step, None] * value
    return mixed


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self, shape: DraftShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.eps)
        self.hidden_norm = RMSNorm(shape.width, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.eps)
        self.mlp = MLP(shape.width, shape.mlp_width)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What the projections read: the normed embedding, then the normed hidden state, [..., 2 D]."""
        return torch.cat((self.input_layernorm(embedded).to(hidden.dtype), self.hidden_norm(hidden)), -1)

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream behind attention's mix [B, H, S, E] and the MLP."""
        stream = residual + self.self_attn.output(mixed)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class DraftModel(nn.Module):
    """`embedding` [vocab, D] is the target's and is neither trained nor stored."""

    def __init__(self, shape: DraftShape, embedding: Tensor):
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.feature_layers) * shape.width, shape.width, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.width, shape.eps)
        self.lm_head = nn.Linear(shape.width, shape.draft_vocab_size, bias=False)
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))

    @torch.no_grad()
    def initialise(self, seed: int, d2t: Tensor, head: Tensor, final_norm: Tensor) -> None:
        """Starts as the target's last captured state under the target's own norm and head, with a quiet layer on top.

        head [vocab, D] and final_norm [D] are the target's; d2t [V] offsets.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = 0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                drawn = torch.randn(weight.shape, generator=generator)
                weight.copy_(drawn * scale * weight.shape[1] ** -0.5)
        width = self.shape.width
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -width:] += torch.eye(width, device=self.fc.weight.device)
        self.d2t.copy_(d2t)
        self.lm_head.weight.copy_(head[self.target_ids()])
        self.norm.weight.copy_(final_norm)

    def target_ids(self) -> Tensor:
        """The target's id of every draft token, int64 [V]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def logits(self, stream: Tensor) -> Tensor:
        """Residual stream [..., D] -> logits over the draft's vocabulary [..., V]."""
        return self.lm_head(self.norm(stream))

    def unroll(self, features: Tensor, ids: Tensor, steps: int) -> Iterator[Tensor]:
        """The residual stream [B, S, D] of each step. features [B, S, F], ids int64 [B, S], padded on the right.

        Rows whose tokens would lie beyond the sequence are junk."""
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device)
        seen = positions <= positions.unsqueeze(1)
        shifted = F.pad(ids, (0, steps))
        layer, stream = self.midlayer, self.fc(features)
        keys, values = [], []
        for step in range(steps):
            embedded = F.embedding(shifted[:, step + 1 : step + 1 + length], self.embedding)
            q, k, v = layer.self_attn.project(layer.inputs(embedded, stream), positions + step)
            keys.append(k)
            values.append(v)
            stream = layer.finish(stream, attend(q, keys, values, seen))
            yield stream
