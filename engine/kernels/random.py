"""Counter-based noise: the same bits for the same (seed, position, token) on every rank, batch and device.

Philox-4x32 with 10 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3), in
int64 arithmetic so that it runs wherever PyTorch does.
"""

from __future__ import annotations

import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def _mul_hi_lo(a: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a * m for 32-bit a held in int64: halves, since the product may pass 63 bits."""
    low = (a & 0xFFFF) * m
    high = (a >> 16) * m + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Four words of 32 random bits a counter; all tensors int64 holding 32-bit values, broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(c0, _M0)
        hi1, lo1 = _mul_hi_lo(c2, _M1)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def uniform(seeds_S: torch.Tensor, positions_S: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Float32 [S, V] strictly inside (0, 1): row s is a function of (seed, position) alone."""
    device = seeds_S.device
    blocks = torch.arange(-(-vocab_size // 4), device=device).unsqueeze(0)
    seeds, positions = seeds_S.unsqueeze(1), positions_S.unsqueeze(1)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    words = philox([blocks, positions & _MASK, positions >> 32, zero], [seeds & _MASK, (seeds >> 32) & _MASK])
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def gumbel(seeds_S: torch.Tensor, positions_S: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [S, V]: argmax(logits + noise) draws from softmax(logits)."""
    return -torch.log(-torch.log(uniform(seeds_S, positions_S, vocab_size)))
