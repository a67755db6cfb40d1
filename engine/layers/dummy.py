"""Made-up weights: every byte of a rank's share without a checkpoint, on the device, in seconds.

They keep activations finite and of order 1 through any number of layers, and routing diverse; they mean nothing.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from engine.layers.embedding import Embedding
from engine.layers.moe import Router
from engine.layers.norm import RMSNorm

NIBBLE_STD = math.sqrt((16**2 - 1) / 12)  # of uniform integers -8..7, about their mean


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Overwrites all parameters in place. The same model on the same kind of device gets the same values for `seed`.

    Goes by dtype and role, not by storage: integers are packed weights and take random bits, floats beside them are
    their scales. On the meta device nothing happens.
    """
    parameters = list(model.parameters())
    if not parameters or parameters[0].device.type == "meta":
        return
    generator = torch.Generator(parameters[0].device).manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            _fill(module, name, parameter, generator)


@torch.no_grad()
def _fill(module: nn.Module, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    if not parameter.is_floating_point():
        limits = torch.iinfo(parameter.dtype)
        parameter.random_(limits.min, limits.max + 1, generator=generator)
        return
    low, high = _bounds(module, name, parameter)
    parameter.uniform_(low, high, generator=generator)
    if _holds_scales(module):
        # Nibbles -8..7 have a mean, and a common direction would grow until all rows took the same experts.
        signs = torch.empty_like(parameter).bernoulli_(0.5, generator=generator)
        parameter.mul_(signs.mul_(2).sub_(1))


def _bounds(module: nn.Module, name: str, parameter: torch.Tensor) -> tuple[float, float]:
    """Limits of the uniform values of a float parameter."""
    if isinstance(module, RMSNorm):
        return 0.8, 1.2
    if isinstance(module, Router) and parameter.dim() == 1:
        return -0.01, 0.01  # near the selected scores a tenth of a logit: more would favour the same experts
    if _holds_scales(module):
        columns = module.columns.stop - module.columns.start
        scale = 1 / (NIBBLE_STD * math.sqrt(columns if "down" in name else module.width))
        return 0.5 * scale, 1.5 * scale
    std = 1.0 if isinstance(module, Embedding) else parameter.shape[-1] ** -0.5
    return -math.sqrt(3) * std, math.sqrt(3) * std


def _holds_scales(module: nn.Module) -> bool:
    """Whether its float parameters are the scales of packed weights beside them."""
    return any(not parameter.is_floating_point() for parameter in module.parameters(recurse=False))
