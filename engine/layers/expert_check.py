"""The self-test of INT4 experts: one expert's product as the layer computes it, against plain dequantised matrices.

Kernels that are sound on one kind of GPU have given noise on another; here that shows before the first answer.

Shape letters: T rows, K experts a row, D model width, I this rank's columns of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import reference
from engine.layers.quant import FloatExperts

ROWS = (1, 7, 64, 65)
"""One row, some, the most of the kernels for few rows, and one more."""
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Most of the result's norm that rounding explains; INT4 kernels on an H200 stay below 1e-2."""

Packed = tuple[torch.Tensor, torch.Tensor]


def largest_error(
    experts: FloatExperts, index: int, matrices: dict[str, Packed], dtype: torch.dtype, top_k: int
) -> float:
    """The norm of the error over that of the result, the largest of all numbers of rows.

    index: the expert's place among this rank's. matrices: "gate_proj", "up_proj" and "down_proj" -> (int32 words,
    scales) of this rank's columns as the checkpoint stores them. dtype: the activations'. top_k: experts a row."""
    device = next(experts.parameters()).device
    wide = {name: reference.unpack_int4(*map(torch.Tensor.cpu, packed)) for name, packed in matrices.items()}
    gate_ID, up_ID, down_DI = (wide[name].to(device, dtype).float() for name in ("gate_proj", "up_proj", "down_proj"))
    generator, errors = torch.Generator().manual_seed(0), []
    for rows in ROWS:
        x_TD = torch.randn(rows, gate_ID.shape[1], generator=generator).to(device, dtype)
        x = x_TD.float()
        expected_TD = (F.silu(x @ gate_ID.t()) * (x @ up_ID.t())) @ down_DI.t()
        error_TD = _product(experts, index, x_TD, top_k) - expected_TD
        share = (error_TD.norm() / expected_TD.norm()).item()
        errors.append(share if error_TD.any() else 0.0)  # an expert of zeros has no size to take a share of
    return max(errors, key=lambda error: (error != error, error))  # what is not a number is worst


def _product(experts: FloatExperts, index: int, x_TD: torch.Tensor, top_k: int) -> torch.Tensor:
    """Float32 [T, D] of the one expert. Where all experts are here, kernels may count on top_k of them in every row:
    the others weigh nothing."""
    num_local = len(experts.local)
    others = [i for i in range(num_local) if i != index][: top_k - 1] if experts.in_parts else []
    ids = [index, *others] + [-1] * (top_k - 1 - len(others))
    ids_TK = torch.tensor(ids, device=x_TD.device).repeat(x_TD.shape[0], 1)
    weights_TK = (ids_TK == index).float()
    out = experts(x_TD, ids_TK, weights_TK)
    return (reference.add_parts(out) if out.dim() == 3 else out).float()
