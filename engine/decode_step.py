"""What a step of decodes computes from its inputs in fixed places: all of it on the device, so that it can be captured.

Shape letters: N requests, W rows a request, M = N x W rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from engine.comm.dispatcher import TokenDispatcher
from engine.decode_batch import DecodeBatch
from engine.sampled_step import Forwarded, SampledStep
from engine.verify import VerifyRows


class Variant(NamedTuple):
    """Steps of up to num_requests requests that verify num_verify guesses of each and make num_propose new ones."""

    num_requests: int
    num_verify: int = 0
    num_propose: int = 0

    @property
    def width(self) -> int:
        return self.num_verify + 1

    @property
    def num_rows(self) -> int:
        return self.num_requests * self.width


def variants(sizes: list[int], num_guesses: int, max_rows: int) -> list[Variant]:
    """Of each size: a plain step, one that only guesses, and those that verify and guess alike, up to max_rows rows."""
    found = []
    for size in sizes:
        found += [Variant(size, k, k) for k in range(num_guesses + 1) if size * (k + 1) <= max_rows or k == 0]
        if num_guesses and size * 2 <= max_rows:
            found.append(Variant(size, 0, num_guesses))
    return found


class DecodeStep:
    """dispatcher_of(rows): the target's dispatcher for a step of so many rows.

    logits_buffer: float32 [most rows, V], where `forward` leaves logits that the host may change before `finish`.
    """

    def __init__(
        self,
        model: Any,
        sampled_step: SampledStep,
        dispatcher_of: Callable[[int], TokenDispatcher],
        caches: torch.Tensor,
        logits_buffer: torch.Tensor,
    ):
        self.model, self.sampled_step, self.dispatcher_of = model, sampled_step, dispatcher_of
        self.caches, self.logits_buffer = caches, logits_buffer
        self._starts: dict[Variant, torch.Tensor] = {}

    def whole(self, inputs: DecodeBatch, variant: Variant) -> None:
        self.sampled_step(*self._forward(inputs, variant), variant.num_propose)

    def forward(self, inputs: DecodeBatch, variant: Variant) -> tuple:
        """The part up to the logits, which lie in the buffer; returns what `finish` takes."""
        forwarded, requests, rows = self._forward(inputs, variant)
        logits_MV = self.logits_buffer[: variant.num_rows]
        logits_MV.copy_(forwarded.logits_MV)
        return forwarded._replace(logits_MV=logits_MV), requests, rows

    def finish(self, variant: Variant, forwarded: tuple) -> None:
        self.sampled_step(*forwarded, variant.num_propose)

    def _forward(self, inputs: DecodeBatch, variant: Variant) -> tuple:
        step = self.sampled_step
        rows: VerifyRows = step.verify_ops.verify_rows(
            inputs.requests, step.state, inputs.sampling, variant.width, inputs.block_size
        )
        starts = self._query_starts(variant, rows.starts_N.device)
        batch = inputs.forward_batch(rows, starts, variant.width, self.dispatcher_of(variant.num_rows))
        features = () if step.drafter is None else step.drafter.feature_layers
        hidden_MD, features_MF = self.model.forward_with_features(batch, self.caches, features)
        forwarded = Forwarded(batch, self.model.logits(hidden_MD), features_MF, None, None, inputs.num_real_1)
        return forwarded, inputs.requests, rows

    def _query_starts(self, variant: Variant, device: torch.device) -> torch.Tensor:
        """Made before a capture, so that replays need not make it."""
        if variant not in self._starts:
            self._starts[variant] = torch.arange(
                0, variant.num_rows + 1, variant.width, dtype=torch.int32, device=device
            )
        return self._starts[variant]
