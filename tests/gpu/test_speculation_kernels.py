"""The kernels of speculation on a GPU: the bookkeeping of verify steps, a draft's attention and products, in graphs."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")
from engine import sampling
from engine import verify as twin
from engine.kernels import reference
from engine.kernels.gpu import sample, verify
from engine.kernels.gpu.kernels import TritonKernels
from engine.kernels.reference_kernels import ReferenceKernels
from tests.head_cases import SCALE, HeadCase, check_rotate, check_store, expected_heads, head_case
from tests.mla_cases import relative_error
from tests.small_kernels import EPS, Bench
from tests.verify_cases import VerifyCase, assert_same, check_step, copied, verify_case, whole_step

pytestmark = pytest.mark.gpu
# 2^-8 is half a unit in the last place of bfloat16; the norm over many numbers is smaller.
BENCH = Bench("cuda", torch.bfloat16, 4e-3)
# A row's last bits come of other instructions where the library makes the product.
ROUNDED = 1e-2
HEADS = [(8, 8, 128), (8, 1, 128), (64, 8, 128), (16, 1, 64), (8, 2, 32), (4, 4, 32), (6, 2, 64)]


def captured(step) -> tuple[torch.cuda.CUDAGraph, object]:
    """`step` has run before, so that all of it is compiled. Returns the graph and what `step` gave in it."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def overwrite(old: VerifyCase, new: VerifyCase) -> None:
    """Another step's inputs in the places of the first."""
    pairs = [*zip(old.requests, new.requests, strict=True), (old.tokens_M, new.tokens_M)]
    pairs += zip(vars(old.state).values(), vars(new.state).values(), strict=True)
    pairs += zip(vars(old.sampling_N).values(), vars(new.sampling_N).values(), strict=True)
    for target, source in pairs:
        target.copy_(source)


@pytest.mark.parametrize("width", range(1, 17))
def test_verify_steps(width):
    for seed in range(12):
        for guesses in {width - 1, width, 15} - {0, 16} | ({0} if width == 1 else set()):
            count = random.Random(seed).choice([1, 2, 5, 16, 63, 64])
            check_step(verify_case(100 * width + seed, count, width, guesses, "cuda", blocks=5, block_size=64))


@pytest.mark.parametrize(("count", "width", "guesses"), [(1, 1, 0), (1, 4, 3), (4, 1, 3), (16, 4, 7), (64, 8, 7)])
def test_verify_steps_replay_as_one_graph(count, width, guesses):
    """The state that a replay leaves is what the next one reads."""

    def another(seed: int) -> VerifyCase:
        return verify_case(seed, count, width, guesses, "cuda", block_size=64)

    case = another(0)
    whole_step(verify, case, copied(case.state))
    graph, found = captured(lambda: whole_step(verify, case, case.state))
    for seed in range(1, 6):
        overwrite(case, another(seed))
        state = copied(case.state)
        for _ in range(3):
            expected = whole_step(twin, case, state)
            graph.replay()
            assert_same(found, expected)


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("seed", range(4))
def test_attention_of_random_batches(shape, seed):
    choice = random.Random(seed)
    lengths = [
        choice.choice([0, 1, 63, 64, 65, choice.randint(1, 300), choice.randint(1, 5000)])
        for _ in range(choice.choice([1, 3, 8, 20]))
    ]
    case = head_case([*lengths, 4097 + seed], shape, device="cuda", seed=seed)
    found = case.attend()
    assert relative_error(found, expected_heads(case)) < BENCH.bound and not found[case.seq_lens_N == 0].any()


@pytest.mark.parametrize("shape", HEADS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(shape):
    lengths = [700, 4096, 64, 5, 9000, 300, 0, 2047] * 8
    case = head_case(lengths, shape, device="cuda")
    whole = case.attend()
    for rows in (slice(0, 1), slice(4, 5), slice(0, 4), slice(1, 17), slice(33, 64)):
        assert torch.equal(case.part(rows).attend(), whole[rows])
    assert torch.equal(HeadCase(case.q_NHd, case.cache, case.table_NB.int(), case.seq_lens_N).attend(), whole)


def test_attention_over_long_contexts_with_offsets_past_32_bits():
    case = head_case([131_072, 100, 40_001], (8, 8, 128), device="cuda")
    pages = 2**31 // (64 * 2048) + 2 * case.cache.shape[0]
    cache = torch.full((pages, 64, 2048), float("nan"), dtype=torch.bfloat16, device="cuda")
    expected = expected_heads(case)
    cache[-case.cache.shape[0] :] = case.cache
    case.table_NB = torch.where(case.table_NB >= 0, case.table_NB + pages - case.cache.shape[0], case.table_NB)
    case.cache = cache
    assert relative_error(case.attend(), expected) < BENCH.bound


def test_attention_replays_with_other_lengths():
    case = head_case([4000, 300, 0, 64], (8, 2, 128), device="cuda")
    lengths_N = case.seq_lens_N.clone()
    case.attend()
    graph, found = captured(case.attend)
    for shown_N in (lengths_N // 2, torch.zeros_like(lengths_N), lengths_N, (lengths_N - 1).clamp(min=0)):
        case.seq_lens_N.copy_(shown_N)
        graph.replay()
        alone = HeadCase(case.q_NHd, case.cache, case.table_NB, shown_N).attend()
        assert torch.equal(found, alone)
        if shown_N.any():
            assert relative_error(found, expected_heads(case)) < BENCH.bound


@pytest.mark.parametrize("width", [32, 64, 128])
def test_turning_and_storing(width):
    for rows, groups in ((1, 8), (64, 1), (200, 3), (8192, 2)):
        check_rotate(rows, groups, width, torch.bfloat16, "cuda")
        check_store(rows, groups, width, torch.bfloat16, "cuda")
    check_rotate(3, 64, width, torch.bfloat16, "cuda")


def test_the_table_of_kernels_turns_stores_and_attends():
    """Angles as the table gives them, on pairs (i, i + d / 2)."""
    kernels, case = TritonKernels(), head_case([70, 3], (8, 2, 64), device="cuda")
    frequencies = torch.logspace(0, -3, 32, device="cuda")
    cis = kernels.rope_angles(torch.tensor([69, 2], device="cuda"), frequencies, 1.0)
    first, second = case.q_NHd.float().chunk(2, -1)
    turned = torch.view_as_complex(torch.stack([first, second], -1)) * cis.unsqueeze(1)
    q_NHd = kernels.rotate_halves(case.q_NHd, cis)
    assert relative_error(q_NHd, torch.cat([turned.real, turned.imag], -1)) < BENCH.bound
    last_N = case.table_NB.gather(1, (case.seq_lens_N.long() - 1)[:, None] // 64)[:, 0] * 64
    last_N += (case.seq_lens_N.long() - 1) % 64
    kernels.store_heads(case.cache, q_NHd[:, :2], q_NHd[:, 2:4], last_N)
    case.q_NHd = q_NHd
    found = kernels.attend_heads(q_NHd, case.cache, case.table_NB, case.seq_lens_N, SCALE)
    assert torch.equal(case.cache.view(-1, 256)[last_N], q_NHd[:, :4].flatten(1))
    assert relative_error(found, expected_heads(case)) < BENCH.bound


# (outputs, inputs): fc, kv_a, q_a, q_b, o, gate_up, down at full size over 8 ranks; the tiny draft's fc, q, down, head.
SHAPES = [
    *((7168, 2688), (576, 14336), (1536, 14336), (1536, 1536), (7168, 1024), (4608, 7168), (7168, 2304)),
    *((256, 768), (256, 512), (256, 768), (2048, 256)),
]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_of_a_draft(outputs, inputs):
    kernels, weight = TritonKernels(), BENCH.weight(outputs, inputs)
    for rows in (1, 4, 17, 64, 65, 8192):
        wide = BENCH.random(rows, inputs + 16)
        x = wide[:, 16:]  # columns of wider rows
        expected = x.float() @ weight.float().t()
        partial = kernels.partial(x, weight)
        whole = reference.add_parts(partial) if partial.dim() == 3 else partial
        assert relative_error(whole, expected) < ROUNDED
        assert relative_error(kernels.linear(x, weight), expected) < ROUNDED


@pytest.mark.parametrize(("outputs", "inputs"), [(20480, 7168), (2048, 256)])
def test_logits_are_not_rounded(outputs, inputs):
    weight = BENCH.weight(outputs, inputs)
    for rows in (1, 64, 65, 256):
        x = BENCH.random(rows, inputs)
        logits = TritonKernels().linear(x, weight, torch.float32)
        assert logits.dtype == torch.float32
        assert relative_error(logits, x.double() @ weight.double().t()) < 1e-4


@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_what_lies_between_the_products_of_a_draft(rows):
    kernels, plain = TritonKernels(), ReferenceKernels()
    features, weight = BENCH.random(rows, 21504), BENCH.random(21504, seed=4)
    assert relative_error(kernels.rms_norm(features, weight, EPS), plain.rms_norm(features, weight, EPS)) < BENCH.bound
    one, norm = features[:, 7168:14336], weight[:7168]
    assert relative_error(kernels.rms_norm(one, norm, EPS), plain.rms_norm(one, norm, EPS)) < BENCH.bound
    gate_up = BENCH.random(rows, 4608)
    assert relative_error(kernels.silu_mul(gate_up), plain.silu_mul(gate_up)) < BENCH.bound
    partial = BENCH.random(1, rows, 7168, dtype=torch.float32)
    x, residual = kernels.add_norm(partial, one.contiguous(), norm, EPS)
    expected_x, expected = plain.add_norm(partial, one.contiguous(), norm, EPS)
    assert torch.equal(residual, expected) and relative_error(x, expected_x) < BENCH.bound
    table, ids = BENCH.random(320, 7168), torch.arange(rows, device="cuda") % 400
    assert torch.equal(kernels.embed(ids, table, 64), plain.embed(ids, table, 64))


@pytest.mark.parametrize("rows", [1, 17, 64, 65, 8192])
def test_latents_of_keys_alone(rows):
    x, weight = BENCH.random(rows, 14336), BENCH.weight(576, 14336)
    norm, cis, slots = BENCH.random(512, seed=6), BENCH.cis(rows, 64), torch.arange(rows, device="cuda")
    cache = torch.zeros(-(-rows // 64), 64, 576, dtype=torch.bfloat16, device="cuda")
    q, kv = TritonKernels().latents(x, weight, None, norm, EPS, cis, cache, slots)
    _, expected = ReferenceKernels().latents(x, weight, None, norm, EPS, cis, cache.clone(), slots)
    assert q.shape == (rows, 0) and torch.equal(cache.view(-1, 576)[:rows], kv)
    assert relative_error(kv, expected) < ROUNDED


@pytest.mark.parametrize("vocab", [1, 256, 2048, 2049, 20480])
def test_greedy_over_a_shard_of_the_vocabulary(vocab):
    """Few values, so that ties go to the lowest id."""
    for rows in (1, 5, 64):
        logits_SV = BENCH.random(rows, vocab, dtype=torch.float32).round()
        tokens_S = torch.full((rows,), -1, device="cuda")
        maxima_S = sample.greedy(logits_SV, tokens_S)
        first_S = (logits_SV == logits_SV.amax(1, keepdim=True)).int().argmax(1)
        assert torch.equal(maxima_S, logits_SV.amax(1)) and torch.equal(tokens_S, first_S)
        assert torch.equal(maxima_S, sampling.greedy(logits_SV, tokens_S.clone()))
