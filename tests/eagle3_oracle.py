"""EAGLE-3's formulas for one whole sequence, in float32, from a directory of `tests.drafts`; no code of the engine.

No cache and no ranks: every row is computed anew for every guess, keys and values are expanded, angles looped over.

Shape letters: L rows of the sequence so far, F features, D draft width, H heads, d width of a head.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file


class Oracle:
    def __init__(self, directory: Path, target_embedding: torch.Tensor, target_head: torch.Tensor):
        self.config = json.loads((directory / "config.json").read_text())
        self.files = {name: t.float() for name, t in load_file(directory / "model.safetensors").items()}
        self.embedding = self.files.get("embed_tokens.weight", target_embedding)
        self.head = (
            self.embedding if self.flag("tie_word_embeddings") else self.files.get("lm_head.weight", target_head)
        )
        self.prefix = "midlayer." if "midlayer.hidden_norm.weight" in self.files else "layers.0."

    def flag(self, name: str) -> bool:
        return bool(self.config.get(name))

    def weight(self, name: str) -> torch.Tensor:
        return self.files[f"{name}.weight"]

    def layer(self, name: str) -> torch.Tensor:
        return self.files[f"{self.prefix}{name}.weight"]

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        eps = self.config["rms_norm_eps"] if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def fused(self, features_LF: torch.Tensor) -> torch.Tensor:
        """What the layer reads of the target: f."""
        if self.flag("norm_before_fc"):
            features_LF = self.norm(features_LF, self.weight("input_norm"))
        if self.flag("fc_norm"):
            chunks = features_LF.split(self.config["hidden_size"], dim=1)
            legacy = "aux_norm_low.weight" in self.files
            names = (
                ("aux_norm_low", "aux_norm_mid", "aux_norm_high") if legacy else ("fc_norm.0", "fc_norm.1", "fc_norm.2")
            )
            normed = [self.norm(c, self.weight(n)) for c, n in zip(chunks, names, strict=True)]
            features_LF = torch.cat(normed, dim=1)
        return features_LF @ self.weight("fc").t()

    def guesses(
        self, features_LF: torch.Tensor, next_ids: list[int], count: int
    ) -> tuple[list[int], list[torch.Tensor]]:
        """The target ids guessed after next_ids[-1], and the state after each guess."""
        states, ids, tokens, hidden = list(self.fused(features_LF)), list(next_ids), [], []
        for _ in range(count):
            state, logits = self.last_row(torch.stack(states), ids)
            best = int(logits.argmax())
            tokens.append(best + int(self.files["d2t"][best]) if "d2t" in self.files else best)
            hidden.append(state)
            states.append(state)
            ids.append(tokens[-1])
        return tokens, hidden

    def last_row(self, states_LD: torch.Tensor, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the next row reads, logits over the draft's vocabulary) of the last row."""
        a = self.norm(self.embedding[ids], self.layer("input_layernorm"))
        b = self.norm(states_LD, self.layer("hidden_norm"))
        x = torch.cat((a, b), dim=1)
        attention = self.latent_attention if "kv_lora_rank" in self.config else self.full_attention
        residual = (b if self.flag("norm_before_residual") else states_LD)[-1]
        residual = residual + self.layer("self_attn.o_proj") @ attention(x).flatten()
        y = self.norm(residual, self.layer("post_attention_layernorm"))
        gate = self.layer("mlp.gate_proj") @ y
        g = residual + self.layer("mlp.down_proj") @ (gate * gate.sigmoid() * (self.layer("mlp.up_proj") @ y))
        normed = self.norm(g, self.weight("norm"))
        return normed if self.flag("norm_output") else g, self.head @ normed

    def latent_attention(self, x: torch.Tensor) -> torch.Tensor:
        """The last row's heads, [H, V]."""
        c = self.config
        heads, latent, nope, rope = (
            c[n] for n in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        if c.get("q_lora_rank"):
            low = self.norm(self.layer("self_attn.q_a_proj") @ x[-1], self.layer("self_attn.q_a_layernorm"), 1e-6)
            q = (self.layer("self_attn.q_b_proj") @ low).view(heads, nope + rope)
        else:
            q = (self.layer("self_attn.q_proj") @ x[-1]).view(heads, nope + rope)
        both = x @ self.layer("self_attn.kv_a_proj_with_mqa").t()
        low_kv = self.norm(both[:, :latent], self.layer("self_attn.kv_a_layernorm"), 1e-6)
        kv = (low_kv @ self.layer("self_attn.kv_b_proj").t()).view(len(x), heads, -1)
        angles, magnitude = self.angles(rope)
        q_rope = torch.stack([self.turned(h, len(x) - 1, angles, magnitude, True) for h in q[:, nope:]])
        k_rope = torch.stack([self.turned(k, t, angles, magnitude, True) for t, k in enumerate(both[:, latent:])])
        scores = torch.einsum("hn,lhn->hl", q[:, :nope], kv[..., :nope]) + q_rope @ k_rope.t()
        scaling = c.get("rope_scaling") or {}
        temperature = self.mscale(scaling.get("factor", 1), scaling.get("mscale_all_dim", 0)) ** 2
        probs = (scores * temperature / math.sqrt(nope + rope)).softmax(-1)
        return torch.einsum("hl,lhv->hv", probs, kv[..., nope:])

    def full_attention(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        width, heads, kv_heads = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
        angles, magnitude = self.angles(width)
        q = (self.layer("self_attn.q_proj") @ x[-1]).view(heads, width)
        k = (x @ self.layer("self_attn.k_proj").t()).view(-1, kv_heads, width)
        v = (x @ self.layer("self_attn.v_proj").t()).view(-1, kv_heads, width)
        outs = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            query = self.turned(q[head], len(x) - 1, angles, magnitude, False)
            keys = torch.stack([self.turned(k[t, group], t, angles, magnitude, False) for t in range(len(x))])
            outs.append((keys @ query / math.sqrt(width)).softmax(0) @ v[:, group])
        return torch.stack(outs)

    @staticmethod
    def turned(x: torch.Tensor, position: int, angles: list[float], magnitude: float, neighbours: bool) -> torch.Tensor:
        half = len(x) // 2
        out = x.clone()
        for i, angle in enumerate(angles):
            first, second = (2 * i, 2 * i + 1) if neighbours else (i, i + half)
            cos, sin = magnitude * math.cos(position * angle), magnitude * math.sin(position * angle)
            out[first] = x[first] * cos - x[second] * sin
            out[second] = x[first] * sin + x[second] * cos
        return out

    @staticmethod
    def mscale(factor: float, mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def angles(self, width: int) -> tuple[list[float], float]:
        """Radians a position for each pair, and the length that turned pairs are given."""
        theta, scaling = self.config["rope_theta"], self.config.get("rope_scaling")
        plain = [theta ** (-2 * i / width) for i in range(width // 2)]
        if not scaling:
            return plain, 1.0
        factor, length = scaling["factor"], scaling["original_max_position_embeddings"]

        def pair_of(rotations: float) -> float:
            return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_of(scaling["beta_fast"])), 0)
        high = min(math.ceil(pair_of(scaling["beta_slow"])), width - 1)
        mixed = []
        for i, angle in enumerate(plain):
            slow = min(max((i - low) / (high - low), 0.0), 1.0)
            mixed.append(angle * (1 - slow) + angle / factor * slow)
        over, under = (self.mscale(factor, scaling.get(k, d)) for k, d in (("mscale", 1), ("mscale_all_dim", 0)))
        return mixed, over / under
