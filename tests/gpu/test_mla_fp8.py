"""Attention over rows of bytes on a GPU: what it gives over the numbers that they hold, whatever the batch."""

from __future__ import annotations

import random

import pytest
import torch

from engine import LLM, SamplingParams
from engine.kernels import kv_layout
from tests.mla_cases import decode_case, expected_decode, relative_error
from tests.mla_layer import batch_with

pytestmark = pytest.mark.gpu
SCALE = 0.07
FULL = {"latent": 512, "rope": 64, "values": 128, "page": 64, "device": "cuda"}


def decode(case, config=None) -> torch.Tensor:
    from engine.kernels.gpu.mla_decode import mla_decode

    torch.full((2**26,), float("nan"), device="cuda")  # what the allocator hands out next is full of NaN
    return mla_decode(*case.arguments(SCALE), config=config)


def configs() -> list:
    from engine.kernels.gpu.mla_decode import GENERAL

    return [None, GENERAL]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_decode_of_random_batches(heads, seed):
    choice = random.Random(seed)
    query_lens = [choice.choice([1, 1, 2, 4, 16]) for _ in range(choice.randint(1, 12))]
    seq_lens = [choice.choice([0, n, n + 63, choice.randint(n, 300), choice.randint(n, 9000)]) for n in query_lens]
    case = decode_case(query_lens, [*seq_lens[:-1], 5000], heads=heads, seed=seed, **FULL)
    in_bytes, in_numbers = case.in_bytes()
    expected = expected_decode(in_numbers, SCALE)
    for config in configs():
        got = decode(in_bytes, config)
        assert relative_error(got, expected) < 6e-3
        assert relative_error(got, decode(in_numbers, config)) < 2e-3


@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 8, 16])
def test_every_byte_is_the_number_it_stands_for(query_len):
    """All bit patterns but those of NaN, in every place of a tile, the numbers below the normal ones included."""
    case = decode_case([query_len, query_len], [640, 333], heads=8, **FULL)
    cache = case.in_bytes()[0].cache
    bits = torch.randint(0, 254, cache[..., :512].shape, generator=torch.Generator().manual_seed(0))
    cache[..., :512] = (bits + (bits >= 127).int()).to(torch.uint8).cuda()
    cache[..., :512][:, ::3] &= 0x83  # rows of none but small numbers
    cache[..., 640:644] = torch.full((*cache.shape[:2], 1), 2.0**-7, device="cuda").view(torch.uint8)
    cache[..., 512:640] = 0
    case.cache = cache
    numbers = kv_layout.FP8.unpack(cache, 512, 64, torch.bfloat16)
    assert numbers.isfinite().all() and len(numbers.unique()) > 250
    case.q_THX = case.q_THX / 16
    expected = expected_decode(case.__class__(**vars(case) | {"cache": numbers}), SCALE)
    for config in configs():
        assert relative_error(decode(case, config), expected) < 6e-3


@pytest.mark.parametrize("seq_len", [4094, 4096, 4098, 8193, 16385])
def test_a_folded_row_has_the_bits_of_the_row_alone(seq_len):
    case, _ = decode_case([4, 1, 2, 16], [seq_len, 77, 1000, seq_len // 2], heads=8, **FULL).in_bytes()
    whole, start = decode(case), 0
    for n, query_len in enumerate(case.query_lens):
        for i in range(query_len):
            assert torch.equal(decode(case.request(n, i, i + 1))[0], whole[start + i]), (n, i)
        start += query_len


@pytest.mark.parametrize("query_len", [1, 4])
def test_a_row_has_the_same_bits_among_1_4_16_and_64_requests(query_len):
    lengths = [700, 4096, 64, 5, 9000, 300, 129, 2047] * 8
    case, _ = decode_case([query_len] * 64, lengths, heads=8, **FULL).in_bytes()
    whole = decode(case)
    for count in (1, 4, 16):
        part = case.__class__(
            case.query_lens[:count], lengths[:count], case.q_THX[: count * query_len].contiguous(), case.cache,
            case.block_table_NB[:count], case.kv_b_HXC, case.nope,
        )  # fmt: skip
        assert torch.equal(decode(part), whole[: count * query_len])


def test_offsets_past_32_bits():
    """5.2 GB of pages: 2^32 bytes lie between the first page in use and the last."""
    case, numbers = decode_case([2, 1], [9000, 100], heads=8, **FULL).in_bytes()
    pages, used = 124_000, case.cache.shape[0]
    expected = decode(numbers)
    cache = torch.full((pages, 64, 656), 255, dtype=torch.uint8, device="cuda")
    moved = torch.arange(used, device="cuda")
    moved[used // 2 :] += pages - used
    cache[moved] = case.cache
    case.cache, case.block_table_NB = cache, moved[case.block_table_NB]
    assert int(case.block_table_NB.max()) * 64 * 656 > 2**32
    for config in configs():
        assert relative_error(decode(case, config), expected) < 4e-3


@pytest.mark.parametrize(("query_lens", "seq_lens"), [([17, 129], [17 + 640, 129 + 501]), ([64], [64 + 2100])])
def test_chunks_over_a_context_in_bytes(query_lens, seq_lens):
    from engine.attention.triton import TritonAttention

    case = decode_case(query_lens, seq_lens, heads=8, **FULL)
    q, rows = case.q_THX[..., :192].contiguous(), torch.randn(sum(query_lens), 576, device="cuda").to(torch.bfloat16)
    batch = batch_with(case.block_table_NB, query_lens, seq_lens)
    backend, kv_b = TritonAttention(context_tokens=1024), case.kv_b_HXC.flatten(0, 1)
    got, expected = (backend.prefill(q, rows, half.cache, batch, SCALE, kv_b) for half in case.in_bytes())
    assert torch.equal(got, expected) and got.isfinite().all()


def test_what_latents_hand_on_is_what_the_cache_holds():
    from engine.kernels.gpu.kernels import TritonKernels

    x, weight = (torch.randn(n, 256, device="cuda").to(torch.bfloat16) for n in (70, 1536 + 576))
    norms = [torch.rand(width, device="cuda").to(torch.bfloat16) for width in (1536, 512)]
    cis = torch.polar(torch.ones(70, 32, device="cuda"), torch.rand(70, 32, device="cuda"))
    cache = torch.zeros(2, 64, 656, dtype=torch.uint8, device="cuda")
    plain = torch.zeros(2, 64, 576, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(128, device="cuda")[:70]
    rows, exact = (TritonKernels().latents(x, weight, *norms, 1e-6, cis, c, slots)[1] for c in (cache, plain))
    stored = kv_layout.FP8.unpack(cache.flatten(0, 1)[slots], 512, 64, torch.bfloat16)
    assert rows.dtype == torch.bfloat16 and torch.equal(rows, stored)
    assert torch.equal(stored, kv_layout.FP8.unpack(kv_layout.FP8.pack(exact, 512), 512, 64, torch.bfloat16))


def test_the_engine_replays_what_it_computes_at_once():
    rng = random.Random(0)
    prompts = [[rng.randrange(300) for _ in range(count)] for count in (1, 63, 64, 65, 200, 700)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    found = []
    for settings in ({}, {"enforce_eager": True}, {"draft": "auto"}):
        memory = {"kv_cache_memory_gb": 1.0, "kv_cache_dtype": "fp8"}
        with LLM(device="cuda", dtype="bfloat16", max_num_seqs=8, **memory, **settings) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert found[0] == found[1] == found[2]
