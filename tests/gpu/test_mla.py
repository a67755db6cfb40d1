"""The MLA kernels on a GPU: against float32, at any length, and the same bits in any batch."""

from __future__ import annotations

import random

import pytest
import torch

from engine.kernels import reference
from tests.mla_cases import decode_case, expected_decode, relative_error
from tests.mla_layer import batch_with

pytestmark = pytest.mark.gpu
SCALE = 0.07
FULL = {"latent": 512, "rope": 64, "values": 128, "page": 64, "device": "cuda"}


def decode(case, poison: bool = True, config=None):
    from engine.kernels.gpu.mla_decode import mla_decode

    if poison:  # what the allocator hands out next is full of NaN
        torch.full((2**26,), float("nan"), device="cuda")
    return mla_decode(*case.arguments(SCALE), config=config)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_decode_of_random_batches(heads, seed):
    choice = random.Random(seed)
    query_lens = [choice.choice([1, 1, 2, 4, 16]) for _ in range(choice.randint(1, 12))]
    seq_lens = [choice.choice([0, n, n + 63, choice.randint(n, 300), choice.randint(n, 9000)]) for n in query_lens]
    case = decode_case(query_lens, [*seq_lens[:-1], 5000], heads=heads, seed=seed, **FULL)
    assert relative_error(decode(case), expected_decode(case, SCALE)) < 6e-3


@pytest.mark.parametrize("heads", [8, 64])
def test_the_kernel_that_any_gpu_can_run(heads):
    from engine.kernels.gpu.mla_decode import GENERAL

    case = decode_case([1, 4, 2], [700, 9001, 64], heads=heads, **FULL)
    whole = decode(case, config=GENERAL)
    assert relative_error(whole, expected_decode(case, SCALE)) < 6e-3
    assert torch.equal(decode(case.request(1, 2, 3), config=GENERAL)[0], whole[3])


@pytest.mark.parametrize("seq_len", [4094, 4096, 4098, 8193, 16385])
def test_a_folded_row_has_the_bits_of_the_row_alone(seq_len):
    case = decode_case([4, 1], [seq_len, 77], heads=8, **FULL)
    whole = decode(case)
    for i in range(4):
        assert torch.equal(decode(case.request(0, i, i + 1))[0], whole[i])


@pytest.mark.parametrize("query_len", [1, 4])
def test_a_row_has_the_same_bits_among_1_4_16_and_64_requests(query_len):
    lengths = [700, 4096, 64, 5, 9000, 300, 129, 2047] * 8
    case = decode_case([query_len] * 64, lengths, heads=8, **FULL)
    whole = decode(case)
    for count in (1, 4, 16):
        part = case.__class__(
            case.query_lens[:count], lengths[:count], case.q_THX[: count * query_len].contiguous(), case.cache,
            case.block_table_NB[:count], case.kv_b_HXC, case.nope,
        )  # fmt: skip
        assert torch.equal(decode(part), whole[: count * query_len])


def test_the_longest_context_with_offsets_past_32_bits():
    """4.5 GB of pages: 2^31 numbers lie between the first page in use and the last."""
    pages = 62_000
    case = decode_case([2, 1], [262_144, 100], heads=8, **FULL)
    cache = torch.full((pages, 64, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    used = case.cache.shape[0]
    moved = torch.arange(used, device="cuda")
    moved[used // 2 :] += pages - used
    cache[moved] = case.cache
    case.cache, case.block_table_NB = cache, moved[case.block_table_NB]
    assert int(case.block_table_NB.max()) * 64 * 576 > 2**31
    assert relative_error(decode(case, poison=False), expected_decode(case, SCALE)) < 6e-3


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([300], [300]), ([17, 129, 999], [17, 129 + 500, 999]), ([64, 400], [64 + 2100, 401])]
)
@pytest.mark.parametrize("heads", [2, 8])
def test_prefill_against_the_naive_form(heads, query_lens, seq_lens):
    from engine.attention.triton import TritonAttention

    case = decode_case(query_lens, seq_lens, heads=heads, **FULL)
    q = case.q_THX[..., :192].contiguous()
    rows = torch.cat(
        [
            case.cache[case.block_table_NB[n, : -(-length // 64)]].flatten(0, 1)[length - count : length]
            for n, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        ]
    )
    batch = batch_with(case.block_table_NB, query_lens, seq_lens)
    kv_b = case.kv_b_HXC.flatten(0, 1)
    got = TritonAttention(context_tokens=1024).prefill(q, rows, case.cache, batch, SCALE, kv_b)
    expected = reference.mla_prefill(
        q.float(), rows.float(), case.cache.float(), case.block_table_NB, query_lens, seq_lens, SCALE, kv_b.float()
    )
    assert relative_error(got, expected) < 1e-2
