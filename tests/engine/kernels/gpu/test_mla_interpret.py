"""The logic of the MLA kernels under Triton's interpreter: the tests run in a child process that has it switched on."""

from __future__ import annotations

import pytest
import torch

from engine.attention.backend import ATTENTION_BACKENDS
from engine.kernels import reference
from engine.kernels.reference_kernels import ReferenceKernels
from engine.layers.rotary import RopeParameters, RotaryEmbedding
from tests.mla_cases import DecodeCase, decode_case, expected_decode, relative_error
from tests.mla_layer import batch_of, batch_with, build
from tests.triton_interpreter import INTERPRETED, allow_scalar_arrays, interpreted, run_interpreted, starts_interpreter

pytest.importorskip("triton")
if INTERPRETED:
    allow_scalar_arrays()
SCALE = 0.11
PACKED = [40, 30, 20, 17], [40 + 20, 30, 20 + 9, 17 + 70]  # more than 64 rows, short contexts among them
# Not bfloat16, whose products the interpreter of Triton 3.6 takes of the bits as integers.
SMALL = {"latent": 32, "rope": 16, "values": 16, "page": 16, "dtype": torch.float16}


@starts_interpreter
def test_under_the_interpreter():
    code, said = run_interpreted(__file__)
    assert code == 0, said
    assert "passed" in said and "failed" not in said


def decode(case: DecodeCase, monkeypatch, **settings) -> torch.Tensor:
    """The kernel with small splits, its outputs poisoned beforehand."""
    from engine.kernels.gpu import mla_decode

    config = mla_decode.DecodeConfig(**({"tokens": 16, "min_split": 64, "max_splits": 4, "stages": 1} | settings))

    def poisoned(*shape: int, **options) -> torch.Tensor:
        return torch.full(shape, float("nan"), **options)

    monkeypatch.setattr(mla_decode.torch, "empty", poisoned)
    out = mla_decode.mla_decode(*case.arguments(SCALE), config=config)
    monkeypatch.undo()
    return out


@interpreted
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([1, 1, 1], [64, 0, 65]),
        ([4], [258]),  # rows on both sides of a change of the split's size
        ([1, 5, 2, 1, 3], [300, 16, 0, 15, 130]),
        ([3, 0, 1], [3, 0, 17]),
    ],
)
def test_decode_of_ragged_lengths(heads, query_lens, seq_lens, monkeypatch):
    case = decode_case(query_lens, seq_lens, heads=heads, **SMALL)
    got = decode(case, monkeypatch)
    assert relative_error(got, expected_decode(case, SCALE)) < 8e-3
    start = 0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        assert seq_len or got[start : start + query_len].abs().sum() == 0
        start += query_len


@interpreted
def test_a_row_is_the_same_alone_and_folded_in_any_batch(monkeypatch):
    case = decode_case([4, 2, 1], [258, 70, 513], heads=2, **SMALL)
    whole = decode(case, monkeypatch)
    start = 0
    for n, query_len in enumerate(case.query_lens):
        for i in range(query_len):
            alone = decode(case.request(n, i, i + 1), monkeypatch)
            assert torch.equal(alone[0], whole[start + i]), (n, i)
        start += query_len


@interpreted
@pytest.mark.parametrize(
    "settings",
    [{"tokens": 8}, {"min_split": 128}, {"programs": 2}, {"columns": 16}, {"columns": 16, "values": 8}],
)
def test_every_setting_gives_the_same_function(settings, monkeypatch):
    case = decode_case([2, 1, 1], [100, 7, 280], heads=4, index_dtype=torch.int32, **SMALL)
    got = decode(case, monkeypatch, **settings)
    assert relative_error(got, expected_decode(case, SCALE)) < 8e-3


@interpreted
def test_rows_beyond_the_last_request_are_zeros(monkeypatch):
    case = decode_case([1, 2], [40, 20], heads=2, **SMALL)
    expected = decode(case, monkeypatch)
    case.q_THX = torch.cat([case.q_THX, torch.full_like(case.q_THX, float("nan"))])
    got = decode(case, monkeypatch)
    assert torch.equal(got[:3], expected) and got[3:].abs().max() == 0


@interpreted
def test_many_query_heads_take_several_row_tiles(monkeypatch):
    case = decode_case([16, 3], [90, 33], heads=8, **SMALL)
    assert relative_error(decode(case, monkeypatch), expected_decode(case, SCALE)) < 8e-3


@interpreted
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([1], [1]), ([1, 4, 3, 1], [64, 258, 0, 15])])
def test_decode_over_bytes_is_decode_over_what_they_hold(query_lens, seq_lens, monkeypatch):
    in_bytes, in_numbers = decode_case(query_lens, seq_lens, heads=2, **SMALL).in_bytes()
    got = decode(in_bytes, monkeypatch)
    assert relative_error(got, decode(in_numbers, monkeypatch)) < 1e-3
    assert relative_error(got, expected_decode(in_numbers, SCALE)) < 8e-3


@interpreted
def test_a_cache_of_another_width_is_refused():
    from engine.kernels.gpu.mla_decode import mla_decode

    in_bytes, _ = decode_case([1], [9], heads=2, **SMALL).in_bytes()
    in_bytes.cache = torch.cat([in_bytes.cache, in_bytes.cache], dim=2)
    with pytest.raises(ValueError, match="does not hold 32 \\+ 16 numbers"):
        mla_decode(*in_bytes.arguments(SCALE))


def chunk_case(query_lens: list[int], seq_lens: list[int]) -> tuple:
    """(q, the chunks' rows, cache with what comes before them, batch, kv_b) of 2 heads, nope 16, rope 16, latent 32."""
    case = decode_case(query_lens, seq_lens, heads=2, **SMALL)
    rows = [
        case.cache[case.block_table_NB[n, : -(-length // 16)]].flatten(0, 1)[length - count : length]
        for n, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True))
    ]
    batch = batch_with(case.block_table_NB, query_lens, seq_lens)
    return case.q_THX[..., :32].contiguous(), torch.cat(rows), case.cache, batch, case.kv_b_HXC.flatten(0, 1)


@interpreted
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([70], [70]), ([17, 65], [17, 65]), ([33, 20], [33 + 48, 20 + 7]), ([20, 18, 64], [20, 18 + 70, 64]), PACKED],
)
@pytest.mark.parametrize("tma", [False, True])
def test_chunks_over_their_context(query_lens, seq_lens, tma, monkeypatch):
    from engine.attention.triton import TritonAttention
    from engine.kernels.gpu import mla_prefill

    config = mla_prefill.PrefillConfig(queries=32, keys=16, stages=1, tma=tma)
    monkeypatch.setattr(mla_prefill, "GENERAL", config)
    q, rows, cache, batch, kv_b = chunk_case(query_lens, seq_lens)
    got = TritonAttention(context_tokens=32).prefill(q, rows, cache, batch, SCALE, kv_b)
    expected = reference.mla_prefill(
        q.float(), rows.float(), cache.float(), batch.block_table_NB, query_lens, seq_lens, SCALE, kv_b.float()
    )
    assert got.dtype == q.dtype and relative_error(got, expected) < 4e-3


@interpreted
def test_short_contexts_go_together_where_bits_may_depend_on_company():
    from engine.attention.triton import TritonAttention

    backend = TritonAttention(context_tokens=32)
    *_, batch, _ = chunk_case(*PACKED)
    pieces = backend._context(batch, 16)
    assert [(p.rows, p.num_keys, p.page) for p in pieces] == [
        (slice(0, 90), 29, 1), (slice(90, 107), 32, 16), (slice(90, 107), 32, 16), (slice(90, 107), 6, 16)
    ]  # fmt: skip
    assert [one.tolist() for one in pieces[0].starts] == [[0, 40, 70, 90], [0, 20, 20, 29]]
    *_, batch, _ = chunk_case([20, 18, 17], [40, 27, 17])
    assert [p.num_keys for p in backend._context(batch, 16)] == [20, 9], "up to 64 rows each is alone"


@interpreted
@pytest.mark.parametrize(("query_lens", "seq_lens"), [([20, 18], [20, 18 + 42]), PACKED])
def test_chunks_over_a_context_in_bytes(query_lens, seq_lens):
    """As over the numbers that they hold, to the bit."""
    from engine.attention.triton import TritonAttention

    case = decode_case(query_lens, seq_lens, heads=2, **SMALL)
    _, rows, _, batch, kv_b = chunk_case(query_lens, seq_lens)
    q, backend = case.q_THX[..., :32].contiguous(), TritonAttention(context_tokens=32)
    got, expected = (backend.prefill(q, rows, half.cache, batch, SCALE, kv_b) for half in case.in_bytes())
    assert torch.equal(got, expected) and got.isfinite().all()


@interpreted
def test_the_layer_takes_short_and_long_requests_in_any_order():
    """Decode, chunk with context, verify, first chunk: the layer over Triton equals the layer over the reference."""
    mla = build("true heads", 24)
    rotary = RotaryEmbedding(64, RopeParameters(10000.0), torch.device("cpu"), ReferenceKernels())
    chunks = [(0, 9, 10), (1, 5, 25), (2, 3, 6), (3, 0, 17)]
    table = [[5, 1, 3], [2, 6, 4, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16, 17]]
    generator = torch.Generator().manual_seed(2)
    batch = batch_of(table, chunks)
    cache = torch.randn(18, 4, 576, generator=generator)
    x = torch.randn(len(batch.positions_T), 32, generator=generator)
    results = {}
    for name in ("reference", "triton"):
        with torch.inference_mode():
            backend = ATTENTION_BACKENDS[name]()
            results[name] = mla(x, rotary(batch.positions_T), cache.clone(), batch, backend)
    assert relative_error(results["triton"], results["reference"]) < 1e-4
