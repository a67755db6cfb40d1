"""One rank's share of an EAGLE-3 draft: what its checkpoint holds, under the names of `spellings.canonical`.

Shape letters: T rows, F features a row, D draft width.
"""

from __future__ import annotations

import torch
from torch import nn

from draft.eagle3.attention import attention
from draft.eagle3.config import Eagle3Config
from draft.eagle3.vocabulary import VocabularyMap
from engine.attention.backend import AttentionBackend
from engine.comm.parallel_state import ParallelState
from engine.kernels.table import Kernels
from engine.layers.embedding import Embedding, LMHead
from engine.layers.linear import Linear, whole
from engine.layers.moe import DenseFeedForward
from engine.layers.norm import RMSNorm
from engine.loading.weights import TensorSpec


class Eagle3Model(nn.Module):
    """embed_tokens and lm_head are None where the checkpoint has none of its own."""

    def __init__(
        self,
        config: Eagle3Config,
        parallel: ParallelState,
        dtype: torch.dtype,
        *,
        kernels: Kernels,
        backend: AttentionBackend,
        has_embedding: bool,
        has_head: bool,
    ):
        super().__init__()
        self.config, self.parallel, self.dtype, self.kernels = config, parallel, dtype, kernels
        width = config.hidden_size
        self.num_features = config.num_features * config.target_hidden_size
        columns = parallel.split(self.num_features, "feature columns of the draft")
        self.columns = columns
        self.feature_norms = nn.ModuleDict(
            {name.replace(".", "_"): self._norm(size) for name, size in self._feature_norms()}
        )
        self.fc = Linear(self.num_features, {"fc": whole(width)}, dtype, parallel.device, columns)
        self.input_layernorm, self.hidden_norm = self._norm(width), self._norm(width)
        self.self_attn = attention(config, parallel, dtype, kernels, backend)
        self.post_attention_layernorm = self._norm(width)
        parallel.split(config.intermediate_size, "feed-forward columns of the draft")
        self.mlp = DenseFeedForward(width, config.intermediate_size, parallel, dtype, kernels)
        self.norm = self._norm(width)
        self.embed_tokens = Embedding(config.vocab_size, width, parallel, dtype, kernels) if has_embedding else None
        self.lm_head = LMHead(config.draft_vocab_size, width, parallel, dtype, kernels) if has_head else None
        self.vocabulary = VocabularyMap(config.draft_vocab_size, config.vocab_size, parallel.device)

    def _norm(self, width: int) -> RMSNorm:
        return RMSNorm(width, self.config.rms_norm_eps, self.dtype, self.parallel.device, self.kernels)

    def _feature_norms(self) -> list[tuple[str, int]]:
        """Name and width of each norm before `fc`."""
        if self.config.norm_before_fc:
            return [("input_norm", self.num_features)]
        if self.config.fc_norm:
            return [(f"fc_norm.{i}", self.config.target_hidden_size) for i in range(self.config.num_features)]
        return []

    def fuse(self, features_TF: torch.Tensor) -> torch.Tensor:
        """`fc` of the target's features, normed first where the draft wants it; a partial over ranks: each rank reads
        its columns. Raises ValueError where the rows are not those of all captured layers."""
        if features_TF.shape[-1] != self.num_features:
            raise ValueError(
                f"the draft reads {self.config.num_features} states of {self.config.target_hidden_size} numbers a row, "
                f"not {features_TF.shape[-1]} numbers; the target must capture all its feature_layers."
            )
        norms = list(self.feature_norms.values())
        if norms:
            chunks = features_TF.chunk(len(norms), dim=-1)
            normed = [norm(chunk.contiguous()) for norm, chunk in zip(norms, chunks, strict=True)]
            features_TF = torch.cat(normed, dim=-1)
        return self.kernels.partial(features_TF[:, self.columns].contiguous(), self.fc.weight)

    def specs(self, names: set[str]) -> dict[str, TensorSpec]:
        """Every tensor under its canonical name; `names`: those in the file, since some may be there or not."""
        specs = self.fc.specs("") | self.norm.specs("norm")
        for name, _ in self._feature_norms():
            specs |= self.feature_norms[name.replace(".", "_")].specs(name)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            specs |= getattr(self, name).specs(f"midlayer.{name}")
        specs |= self.self_attn.specs("midlayer.self_attn.") | self.mlp.specs("midlayer.mlp.")
        if self.embed_tokens is not None:
            specs |= self.embed_tokens.specs("embed_tokens")
        if self.lm_head is not None:
            specs |= self.lm_head.specs("lm_head")
        return specs | self.vocabulary.specs(names)
