"""Random decode and prefill batches over a paged latent cache, shared by the interpreter's tests and the GPU's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.kernels import kv_layout


@dataclass
class DecodeCase:
    """seq_lens may hold 0, a padding request that has its query tokens all the same."""

    query_lens: list[int]
    seq_lens: list[int]
    q_THX: torch.Tensor
    cache: torch.Tensor
    block_table_NB: torch.Tensor
    kv_b_HXC: torch.Tensor
    nope: int

    @property
    def w_v_HVC(self) -> torch.Tensor:
        return self.kv_b_HXC[:, self.nope :]

    def arguments(self, scale: float) -> tuple:
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).to(self.q_THX.device, torch.int32)
        lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=self.q_THX.device)
        return (
            self.q_THX, self.cache, self.block_table_NB, starts, lens, scale, self.w_v_HVC, max(self.query_lens),
        )  # fmt: skip

    def in_bytes(self) -> tuple[DecodeCase, DecodeCase]:
        """(The case with its cache in bytes, the case with the numbers that those hold). Where no sequence has written,
        bytes are those of NaN: in latents, roped keys and scales."""
        latent, rope = self.w_v_HVC.shape[2], self.cache.shape[2] - self.w_v_HVC.shape[2]
        bytes_ = kv_layout.FP8.pack(self.cache, latent)
        bytes_[self.cache.isnan().any(-1)] = 255
        numbers = kv_layout.FP8.unpack(bytes_, latent, rope, self.cache.dtype)
        return replace(self, cache=bytes_), replace(self, cache=numbers)

    def request(self, n: int, first: int, last: int) -> DecodeCase:
        """Query tokens first to last of request n, alone."""
        start, length = sum(self.query_lens[:n]), self.seq_lens[n] - self.query_lens[n] + last
        q_THX = self.q_THX[start + first : start + last].contiguous()
        table = self.block_table_NB[n : n + 1]
        return DecodeCase([last - first], [length], q_THX, self.cache, table, self.kv_b_HXC, self.nope)


def decode_case(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    heads: int,
    latent: int,
    rope: int,
    values: int,
    page: int,
    device: str = "cpu",
    seed: int = 0,
    index_dtype: torch.dtype = torch.int64,
    dtype: torch.dtype = torch.bfloat16,
) -> DecodeCase:
    """A cache in shuffled pages that is NaN wherever no sequence has written, the rest of each last page included."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-n // page) for n in seq_lens]
    order = (torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    width = latent + rope
    cache = torch.full((len(order) + 1, page, width), float("nan"), dtype=dtype, device=device)
    table = torch.zeros(len(seq_lens), max(1, *counts), dtype=index_dtype, device=device)
    for n, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        pages = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64, device=device)
        table[n, :count] = pages.to(index_dtype)
        rows = torch.full((count * page, width), float("nan"), dtype=dtype, device=device)
        rows[:length] = torch.randn(length, width, generator=generator, device=device).to(dtype)
        cache[pages] = rows.view(count, page, width)
    q_THX = torch.randn(sum(query_lens), heads, width, generator=generator, device=device).to(dtype)
    kv_b = torch.randn(heads, 2 * values, latent, generator=generator, device=device) / latent**0.5
    return DecodeCase(query_lens, seq_lens, q_THX, cache, table, kv_b.to(dtype), values)


def expected_decode(case: DecodeCase, scale: float) -> torch.Tensor:
    """Float32 attention of every row of q by itself; zeros for padding."""
    heads, values = case.w_v_HVC.shape[:2]
    out = torch.zeros(case.q_THX.shape[0], heads, values, device=case.q_THX.device)
    latent, row = case.w_v_HVC.shape[2], 0
    for n, (query_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        pages = case.block_table_NB[n, : -(-seq_len // case.cache.shape[1])].long()
        keys = case.cache[pages].flatten(0, 1).float()
        for i in range(query_len if seq_len else 0):
            seen = keys[: seq_len - query_len + i + 1]
            probs = (case.q_THX[row + i].float() @ seen.t() * scale).softmax(-1)
            out[row + i] = torch.einsum("hc,hvc->hv", probs @ seen[:, :latent], case.w_v_HVC.float())
        row += query_len
    return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm; NaN where anything is."""
    return float((got.float() - expected).norm() / expected.norm())
