"""Dense weights. A layer holds its rank's share; sums over ranks are the dispatcher's job, not the layer's.

Weights are [out, in], row-major. Shape letters: T tokens, O outputs of this rank, I inputs of this rank.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.parameter import WHOLE, empty, spec
from engine.loading.weights import TensorSpec


class Linear(nn.Module):
    """The weight of one product for one or several checkpoint tensors that read the same input.

    parts: name -> (outputs in the checkpoint, this rank's outputs among them). inputs: this rank's slice of the
    checkpoint's input columns. Outputs lie in the order of `parts`.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, tuple[int, slice]],
        dtype: torch.dtype,
        device: torch.device,
        inputs: slice = WHOLE,
    ):
        super().__init__()
        self.in_features = in_features
        self.parts = parts
        self.inputs = inputs
        self.sizes = [len(range(*share.indices(out))) for out, share in parts.values()]
        self.weight = empty(sum(self.sizes), len(range(*inputs.indices(in_features))), dtype=dtype, device=device)

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        """Keys are prefix + part + ".weight"."""
        targets = self.weight.split(self.sizes)
        return {
            f"{prefix}{name}.weight": spec((out, self.in_features), (share, self.inputs), target)
            for (name, (out, share)), target in zip(self.parts.items(), targets, strict=True)
        }


def whole(out_features: int) -> tuple[int, slice]:
    """A part that every rank holds in full."""
    return out_features, WHOLE
