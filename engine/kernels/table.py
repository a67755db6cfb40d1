"""The fused operations a model's layers are made of, and the table of their implementations.

`reference` composes the plain PyTorch twins and is the oracle; `triton` needs a GPU and bfloat16.

Shape letters: T rows, D model width, O outputs, I inputs, P parts of a split sum, H heads, N nope width, C latent
width, R rope width, X = C + R, E experts, K experts a token, S shared expert columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Routing(NamedTuple):
    """Local expert ids [T, K] (-1 = not here, or a padding row), float32 weights [T, K], the shared expert's activation
    [T, S], and what the kernels of the experts may take for these very rows, None where they make it themselves."""

    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    shared_TS: torch.Tensor
    plan: Any = None


class Kernels(Protocol):
    """is_capturable: no operation reads anything back to the host, so a step may be captured in a CUDA graph.
    reads_packed_experts: INT4 experts stay packed where their shape allows it. needs_powers_of_two: of the latent width
    and of a head's.
    """

    name: str
    is_capturable: bool
    reads_packed_experts: bool
    needs_powers_of_two: bool

    def linear(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x times weight transposed, [T, O], in `dtype` or the weight's."""

    def partial(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """The same for a sum that `add_norm` ends: [T, O], or parts [P, T, O] to be added up in order."""

    def argmax(self, logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's largest float32 logit and its place, int64; of several the lowest."""

    def embed(self, token_ids_T: torch.Tensor, weight_VD: torch.Tensor, first: int) -> torch.Tensor:
        """Rows token - first of the weight, [T, D]; zeros for tokens whose row is not there."""

    def rope_angles(self, positions_T: torch.Tensor, frequencies: torch.Tensor, magnitude: float) -> torch.Tensor:
        """complex64 [T, R / 2]: magnitude * exp(i * position * frequency), angles in float32."""

    def silu_mul(self, gate_up_TI: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for rows [gate | up]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension, with the checkpoint's rounding order."""

    def add_norm(
        self, partial: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(RMSNorm of residual + partial, residual + partial); partial is [T, D] or parts [P, T, D]."""

    def latents(
        self,
        x_TD: torch.Tensor,
        weight: torch.Tensor,
        q_norm_Q: torch.Tensor | None,
        kv_norm_C: torch.Tensor,
        eps: float,
        cis: torch.Tensor,
        cache: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x times [q_a | kv_a]: the query latent [T, Q], normed where q_norm_Q is given, and the cache rows [T, X]
        (normed latent, roped key), also written to their slots and given as they will be read from there: a cache of
        another layout (kv_layout) rounds them, and a chunk must see of itself what later chunks see of it."""

    def queries(
        self, q_TQ: torch.Tensor, weight: torch.Tensor | None, nope: int, cis: torch.Tensor, num_heads: int
    ) -> torch.Tensor:
        """Each head's query with its rope part turned, [T, H, N + R]; without a weight, q_TQ holds them unturned."""

    def absorbed_queries(
        self,
        q_TQ: torch.Tensor,
        weight: torch.Tensor | None,
        w_k_HNC: torch.Tensor,
        cis: torch.Tensor,
    ) -> torch.Tensor:
        """Each head's query for the latent cache, [T, H, X]."""

    def rotate_halves(self, x_THd: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        """Rotary embedding on pairs (i, i + d / 2) of each head, Llama's layout; cis complex64 [T, d / 2]."""

    def store_heads(self, cache: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Writes keys and values of G heads to their slots of cache [blocks, block_size, 2 x G x d], keys first."""

    def attend_heads(
        self, q_NHd: torch.Tensor, cache: torch.Tensor, table_NB: torch.Tensor, seq_lens_N: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One query a request over its first seq_lens_N keys, H / G query heads a key head; [N, H, d], zeros where
        the length is 0."""

    def route(
        self,
        x_TD: torch.Tensor,
        weight: torch.Tensor,
        bias_E: torch.Tensor,
        num_tokens_1: torch.Tensor,
        local_experts: range,
        top_k: int,
        normalize: bool,
        scale: float,
        counts_E: torch.Tensor | None = None,
    ) -> Routing:
        """x times [router | shared gate | shared up], and the choice of experts.

        counts_E: int64, grows by one for each expert that a row chooses, local or not; padding rows choose none.
        """


def _reference() -> Kernels:
    from engine.kernels.reference_kernels import ReferenceKernels

    return ReferenceKernels()


def _triton() -> Kernels:
    from engine.kernels.gpu.kernels import TritonKernels

    return TritonKernels()


KERNELS: dict[str, Callable[[], Kernels]] = {"reference": _reference, "triton": _triton}


def choose(device: torch.device, dtype: torch.dtype) -> str:
    """Triton's for bfloat16 on a GPU; float32 and CPUs take the reference."""
    return "triton" if device.type == "cuda" and dtype == torch.bfloat16 else "reference"


def reads_packed_experts(device: torch.device, dtype: torch.dtype) -> bool:
    """What the chosen kernels say of it, told without loading them."""
    return choose(device, dtype) == "triton"
