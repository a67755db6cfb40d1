"""Kimi-K2.5's text model: the layers in the paper's order, and the checkpoint's names for them.

Shape letters: T tokens, t rows this rank holds between attention and attention, D model width, S sampled rows,
V vocabulary (in attention: value width of a head), C latent width, R rope width, H this rank's heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from engine.attention.backend import AttentionBackend
from engine.batch import ForwardBatch
from engine.comm.dispatcher import Norm
from engine.comm.parallel_state import ParallelState
from engine.expert_map import ExpertMap
from engine.kernels.table import Kernels
from engine.layers.embedding import Embedding, LMHead
from engine.layers.linear import Linear, whole
from engine.layers.mla import MLA, AttentionInputs
from engine.layers.moe import DenseFeedForward, MoEFeedForward, Router
from engine.layers.norm import RMSNorm
from engine.layers.parameter import WHOLE
from engine.layers.quant import EXPERT_STORAGE
from engine.layers.rotary import RotaryEmbedding, softmax_scale
from engine.loading.weights import TensorSpec
from models.kimi_k25.config import KimiConfig

VISION_PREFIXES = ("vision_tower.", "mm_projector.")


class Between(NamedTuple):
    """Between two attentions: the next norm's output [T, D], the residual stream [t, D], and what the next attention
    takes, None after the last."""

    x_TD: torch.Tensor
    residual_tD: torch.Tensor
    inputs: AttentionInputs | None = None


class DecoderLayer(nn.Module):
    def __init__(self, self_attn: MLA, feed_forward: nn.Module, input_norm: RMSNorm, post_attention_norm: RMSNorm):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.input_layernorm = input_norm
        self.post_attention_layernorm = post_attention_norm

    def forward(
        self, out_THV: torch.Tensor, residual_tD: torch.Tensor, batch: ForwardBatch, next_norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the attention's output to the next layer's normed input [T, D] and the residual stream."""
        partial_TD = self.self_attn.output(out_THV)
        x_tD, residual_tD = batch.dispatcher.reduce(partial_TD, residual_tD, self.post_attention_layernorm)
        return self.feed_forward(x_tD, residual_tD, batch, next_norm)

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        return (
            self.input_layernorm.specs(f"{prefix}input_layernorm")
            | self.post_attention_layernorm.specs(f"{prefix}post_attention_layernorm")
            | self.self_attn.specs(f"{prefix}self_attn.")
            | self.feed_forward.specs(f"{prefix}mlp.")
        )


class KimiModel(nn.Module):
    """One rank's share of the model. `expert_storage` is a key of EXPERT_STORAGE; `shards_tokens` tells whether the
    dispatchers in use hand each rank only a share of the rows, so that it needs the shared expert whole.

    expert_counts: int64 [MoE layers, experts] on the device, by physical slot, where the rows that this rank routes are
    counted; None where `counts_experts` is false."""

    def __init__(
        self,
        config: KimiConfig,
        parallel: ParallelState,
        dtype: torch.dtype,
        *,
        backend: AttentionBackend,
        kernels: Kernels,
        expert_storage: str,
        shards_tokens: bool,
        expert_map: ExpertMap | None = None,
        counts_experts: bool = False,
    ):
        super().__init__()
        self.expert_map = expert_map or ExpertMap()
        self.expert_counts: torch.Tensor | None = None
        if counts_experts:
            shape = (len(config.moe_layers), config.n_routed_experts)
            self.expert_counts = torch.zeros(shape, dtype=torch.int64, device=parallel.device)
        self.config, self.parallel, self.dtype = config, parallel, dtype
        self.backend, self.kernels = backend, kernels
        self.expert_storage, self.shards_tokens = expert_storage, shards_tokens
        self.rotary = RotaryEmbedding(config.qk_rope_head_dim, config.rope, parallel.device, kernels)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, parallel, dtype, kernels)
        self.layers = nn.ModuleList(self._layer(i) for i in range(config.num_hidden_layers))
        self.norm = self._norm()
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, parallel, dtype, kernels)

    def _norm(self) -> RMSNorm:
        config = self.config
        return RMSNorm(config.hidden_size, config.rms_norm_eps, self.dtype, self.parallel.device, self.kernels)

    def _layer(self, index: int) -> DecoderLayer:
        attention = self._attention()
        feed_forward = self._dense() if self.config.is_dense(index) else self._moe(index)
        return DecoderLayer(attention, feed_forward, self._norm(), self._norm())

    def _attention(self) -> MLA:
        config = self.config
        return MLA(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            norm_eps=config.low_rank_norm_eps,
            scale=softmax_scale(config.qk_nope_head_dim + config.qk_rope_head_dim, config.rope),
            parallel=self.parallel,
            dtype=self.dtype,
            kernels=self.kernels,
        )

    def _dense(self) -> DenseFeedForward:
        config = self.config
        return DenseFeedForward(config.hidden_size, config.intermediate_size, self.parallel, self.dtype, self.kernels)

    def _moe(self, index: int) -> MoEFeedForward:
        config, parallel = self.config, self.parallel
        shared, shared_down = None, None
        if config.n_shared_experts:
            inner = config.moe_intermediate_size * config.n_shared_experts
            columns = WHOLE if self.shards_tokens else parallel.split(inner, "shared expert columns")
            shared = (inner, columns)
            parts = {"shared_experts.down_proj": whole(config.hidden_size)}
            shared_down = Linear(inner, parts, self.dtype, parallel.device, columns)
        router = Router(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            config.routed_scaling_factor,
            shared,
            self.dtype,
            parallel.device,
            self.kernels,
            None if self.expert_counts is None else self.expert_counts[index - config.moe_layers.start],
        )
        experts = EXPERT_STORAGE[self.expert_storage](
            config.n_routed_experts, config.hidden_size, config.moe_intermediate_size, parallel, self.dtype
        )
        slots = self.expert_map.of_layer(index)
        return MoEFeedForward(router, experts, shared_down, not self.shards_tokens, self.kernels, slots)

    def forward(self, batch: ForwardBatch, caches: torch.Tensor) -> torch.Tensor:
        """caches: [layers, blocks, block_size, W], rows as kv_layout has them. Returns the final norm's output for all
        tokens, [T, D]."""
        return self.forward_with_features(batch, caches)[0]

    def forward_with_features(
        self, batch: ForwardBatch, caches: torch.Tensor, feature_layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same, and side by side the residual stream of all tokens as it enters each of feature_layers (the number
        of layers: as it leaves the last one), [T, len(feature_layers) x D]; None without any."""
        cis = self.rotary(batch.positions_T)
        between = self.before_attention(cis, batch, caches)
        entering = [between.residual_tD]
        for index in range(len(self.layers)):
            out_THV = self.attention(index, between.inputs, cis, batch, caches)
            between = self.after_attention(index, out_THV, between.residual_tD, cis, batch, caches)
            entering.append(between.residual_tD if len(entering) in feature_layers else None)
        return between.x_TD, self.features([entering[index] for index in feature_layers], batch)

    def before_attention(
        self, cis: torch.Tensor, batch: ForwardBatch, caches: torch.Tensor, with_queries: bool = False
    ) -> Between:
        """From the tokens to the first attention. cis: their rotary angles; with_queries: as MLA.inputs takes it."""
        rows = batch.dispatcher.enter(self.embed_tokens(batch.token_ids_T), self._norm_before(0))
        return self._between(0, *rows, cis, batch, caches, with_queries)

    def attention(
        self,
        index: int,
        inputs: AttentionInputs,
        cis: torch.Tensor,
        batch: ForwardBatch,
        caches: torch.Tensor,
        out_THV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of layer `index`: [T, H, V], in `out_THV` where it is given. The only part of a step that reads the batch's
        host lists."""
        return self.layers[index].self_attn.attention(inputs, cis, caches[index], batch, self.backend, out_THV)

    def after_attention(
        self,
        index: int,
        out_THV: torch.Tensor,
        residual_tD: torch.Tensor,
        cis: torch.Tensor,
        batch: ForwardBatch,
        caches: torch.Tensor,
        with_queries: bool = False,
    ) -> Between:
        """From layer `index`'s attention to the next one, or to the final norm."""
        rows = self.layers[index](out_THV, residual_tD, batch, self._norm_before(index + 1))
        return self._between(index + 1, *rows, cis, batch, caches, with_queries)

    def _norm_before(self, index: int) -> RMSNorm:
        return self.layers[index].input_layernorm if index < len(self.layers) else self.norm

    def _between(
        self,
        index: int,
        x_TD: torch.Tensor,
        residual_tD: torch.Tensor,
        cis: torch.Tensor,
        batch: ForwardBatch,
        caches: torch.Tensor,
        with_queries: bool,
    ) -> Between:
        if index == len(self.layers):
            return Between(x_TD, residual_tD)
        attention = self.layers[index].self_attn
        return Between(x_TD, residual_tD, attention.inputs(x_TD, cis, caches[index], batch.slots_T, with_queries))

    def features(self, entering: list[torch.Tensor], batch: ForwardBatch) -> torch.Tensor | None:
        """The residual streams [t, D] of all tokens side by side, [T, len(entering) x D]; None without any."""
        num_tokens = batch.token_ids_T.shape[0]
        whole = [batch.dispatcher.gather(residual_tD, num_tokens) for residual_tD in entering]
        return torch.cat(whole, dim=-1) if whole else None

    def attention_places(self, num_rows: int, num_queries: int) -> tuple[AttentionInputs, torch.Tensor]:
        """As MLA.places, the same for all layers."""
        return self.layers[0].self_attn.places(num_rows, num_queries)

    def logits(self, x_SD: torch.Tensor) -> torch.Tensor:
        """Float32 [S, V], whole on every rank."""
        return self.lm_head(x_SD)

    @property
    def step_parts(self) -> dict[str, Any]:
        """What decides whether a step may be captured, each with `is_capturable`."""
        parts = {"kernels": self.kernels, "attention backend": self.backend}
        if isinstance(self.layers[-1].feed_forward, MoEFeedForward):
            parts["expert storage"] = self.layers[-1].feed_forward.experts
        return parts

    @property
    def cache_width(self) -> int:
        """Numbers a token a layer."""
        return self.config.cache_width

    @property
    def latent_width(self) -> int:
        """Of those the latent's."""
        return self.config.latent_width

    def specs(self, prefix: str = "") -> dict[str, TensorSpec]:
        """Every tensor of the text model under the checkpoint's names; `prefix` is "" or "language_model."."""
        specs = self.embed_tokens.specs(f"{prefix}model.embed_tokens") | self.norm.specs(f"{prefix}model.norm")
        for index, layer in enumerate(self.layers):
            specs |= layer.specs(f"{prefix}model.layers.{index}.")
        return specs | self.lm_head.specs(f"{prefix}lm_head")
