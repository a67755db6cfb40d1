"""Random caches of keys and values by heads, and what attention over them must give, on any device.

Shape letters as in engine/kernels/gpu/heads.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.kernels import reference
from engine.kernels.gpu import heads
from tests.small_kernels import poisoned

SCALE = 0.11


@dataclass
class HeadCase:
    q_NHd: torch.Tensor
    cache: torch.Tensor
    table_NB: torch.Tensor
    seq_lens_N: torch.Tensor

    def part(self, rows: slice) -> HeadCase:
        """Some of the requests, over the same cache."""
        return replace(
            self,
            q_NHd=self.q_NHd[rows].contiguous(),
            table_NB=self.table_NB[rows],
            seq_lens_N=self.seq_lens_N[rows].contiguous(),
        )

    def attend(self, **settings) -> torch.Tensor:
        with poisoned():
            return heads.attend_heads(self.q_NHd, self.cache, self.table_NB, self.seq_lens_N, SCALE, **settings)


def head_case(
    seq_lens: list[int],
    shape: tuple[int, int, int],
    page: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
) -> HeadCase:
    """shape: H, G, d. Pages in random order; what no request has written, and the table beyond its pages, is junk."""
    num_heads, groups, width = shape
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-length // page) for length in seq_lens]
    order = torch.randperm(sum(counts), generator=generator, device=device) + 1
    cache = torch.full((sum(counts) + 1, page, 2 * groups * width), float("nan"), dtype=dtype, device=device)
    wide = torch.full((len(seq_lens), max(1, *counts) + 3), -(10**9), dtype=torch.int64, device=device)
    for n, (pages, length) in enumerate(zip(order.split(counts), seq_lens, strict=True)):
        wide[n, : len(pages)] = pages
        slots = (pages.unsqueeze(1) * page + torch.arange(page, device=device)).flatten()[:length]
        rows = torch.randn(length, 2 * groups * width, generator=generator, device=device)
        cache.view(-1, cache.shape[2])[slots] = rows.to(dtype)
    q_NHd = 2 * torch.randn(len(seq_lens), num_heads, width, generator=generator, device=device)
    lens_N = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return HeadCase(q_NHd.to(dtype), cache, wide[:, :-1], lens_N)


def expected_heads(case: HeadCase) -> torch.Tensor:
    """Float64, one request and one head at a time."""
    out_NHd = torch.zeros(case.q_NHd.shape, dtype=torch.float64, device=case.q_NHd.device)
    _, num_heads, width = case.q_NHd.shape
    groups, page = case.cache.shape[2] // (2 * width), case.cache.shape[1]
    for n, length in enumerate(case.seq_lens_N.tolist()):
        pages = case.table_NB[n, : -(-length // page)]
        rows_L2Gd = case.cache[pages].flatten(0, 1)[:length].double().unflatten(1, (2, groups, width))
        for head in range(num_heads if length else 0):
            keys_Ld, values_Ld = rows_L2Gd[:, :, head // (num_heads // groups)].unbind(1)
            weights_L = (keys_Ld @ case.q_NHd[n, head].double() * SCALE).softmax(0)
            out_NHd[n, head] = weights_L @ values_Ld
    return out_NHd


def check_rotate(rows: int, num_heads: int, width: int, dtype: torch.dtype, device: str) -> None:
    """The heads are part of wider rows, as of one product for queries, keys and values."""
    generator = torch.Generator(device).manual_seed(rows)
    wide = torch.randn(rows, (num_heads + 2) * width, generator=generator, device=device).to(dtype)
    x_THd = wide[:, width : (num_heads + 1) * width].unflatten(1, (num_heads, width))
    angles = torch.arange(rows, device=device).unsqueeze(1) * 0.7 + torch.arange(width // 2, device=device)
    cis = torch.polar(torch.ones_like(angles), angles)
    with poisoned():
        out_THd = heads.rotate_halves(x_THd, torch.view_as_real(cis).flatten(1))
    first, second = x_THd.double().chunk(2, -1)
    cos, sin = angles.double().cos().unsqueeze(1), angles.double().sin().unsqueeze(1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    assert out_THd.dtype == dtype and out_THd.is_contiguous()
    bound = torch.finfo(dtype).eps / 2 * expected.abs() + 2**-20 * (first.abs() + second.abs()).repeat(1, 1, 2)
    for found_THd in (out_THd, reference.rotate_halves(x_THd, cis)):
        assert ((found_THd.double() - expected).abs() <= bound).all(), "more than one rounding of float32 sums"


def check_store(rows: int, groups: int, width: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator(device).manual_seed(rows)
    wide = torch.randn(rows, 2 * groups * width + 3, generator=generator, device=device).to(dtype)
    k, v = wide[:, : groups * width], wide[:, groups * width : 2 * groups * width]
    slots = torch.randperm(3 * rows, generator=torch.Generator().manual_seed(rows))[:rows].to(device)
    cache = torch.full((3, rows, 2 * groups * width), -7.0, dtype=dtype, device=device)
    expected = cache.clone()
    expected.view(3 * rows, -1)[slots] = wide[:, : 2 * groups * width]
    k_TGd, v_TGd = (rows_TX.unflatten(1, (groups, width)) for rows_TX in (k, v))
    twin = cache.clone()
    heads.store_heads(cache, k_TGd, v_TGd, slots)
    reference.store_heads(twin, k_TGd, v_TGd, slots)
    assert torch.equal(cache, expected) and torch.equal(twin, expected)
