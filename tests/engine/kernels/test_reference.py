"""The plain kernels against slow loops and naive forms: they are the oracle of all others, so they need one too."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize

from engine.attention.backend import ATTENTION_BACKENDS
from engine.batch import ForwardBatch
from engine.kernels import reference
from tests.checkpoints import pack_int4, quantize_int4


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm():
    x, weight = rand(3, 8), rand(8, seed=1)
    expected = torch.stack([row / math.sqrt(float((row**2).mean()) + 1e-5) for row in x]) * weight
    assert torch.allclose(reference.rms_norm(x, weight, 1e-5), expected, atol=1e-6)
    assert reference.rms_norm(torch.zeros(2, 8), weight, 1e-6).abs().max() == 0, "a padding row stays a zero row"


def test_rotation_turns_neighbouring_pairs():
    x, angles = rand(5, 3, 8), rand(5, 4, seed=1)
    cis = torch.polar(torch.ones_like(angles), angles)
    got = reference.rotate_pairs(x, cis)
    for t in range(5):
        for i in range(4):
            cos, sin = math.cos(angles[t, i]), math.sin(angles[t, i])
            a, b = x[t, :, 2 * i], x[t, :, 2 * i + 1]
            assert torch.allclose(got[t, :, 2 * i], a * cos - b * sin, atol=1e-6)
            assert torch.allclose(got[t, :, 2 * i + 1], a * sin + b * cos, atol=1e-6)
    assert got.dtype == x.dtype and reference.rotate_pairs(x[:, 0].bfloat16(), cis).dtype == torch.bfloat16


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.827])
def test_router_against_a_plain_loop(normalize, scale):
    """Sigmoid scores, one group: the bias selects but does not weigh."""
    logits, bias = rand(40, 12), rand(12, seed=1) * 0.7
    ids, weights = reference.route(logits, bias, 3, normalize, scale)
    assert weights.dtype == torch.float32
    changed = 0
    for t in range(40):
        scores = [1 / (1 + math.exp(-v)) for v in logits[t].tolist()]
        biased = sorted(range(12), key=lambda e: -(scores[e] + float(bias[e])))[:3]
        plain = sorted(range(12), key=lambda e: -scores[e])[:3]
        changed += set(biased) != set(plain)
        total = sum(scores[e] for e in biased) if normalize else 1.0
        expected = {e: scores[e] / total * scale for e in biased}
        assert dict(zip(ids[t].tolist(), weights[t].tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)
    assert changed > 10, "the bias must have changed some selections for this to mean anything"


def slow_experts(x, ids, weights, gate_up, down) -> torch.Tensor:
    out = torch.zeros_like(x)
    inner = down.shape[2]
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            expert = int(ids[t, k])
            if expert >= 0:
                gate, up = gate_up[expert, :inner] @ x[t], gate_up[expert, inner:] @ x[t]
                out[t] += weights[t, k] * (down[expert] @ (F.silu(gate) * up))
    return out


def routed(kind: str, rows: int, num_experts: int, top_k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(rows)] or [])
    if kind == "some elsewhere":
        return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.6, -1)
    if kind == "all elsewhere":
        return torch.full_like(ids, -1)
    if kind == "one takes all":
        return torch.cat([torch.full_like(ids[:, :1], 2), torch.full_like(ids[:, 1:], -1)], dim=1)
    return ids


@pytest.mark.parametrize("kind", ["all here", "some elsewhere", "all elsewhere", "one takes all"])
@pytest.mark.parametrize("rows", [1, 2, 7, 65])
def test_experts_against_a_loop(kind, rows):
    ids = routed(kind, rows, 6, 3)
    x, weights = rand(rows, 16), rand(rows, 3, seed=1).abs()
    gate_up, down = rand(6, 20, 16, seed=2) / 4, rand(6, 16, 10, seed=3) / 4
    got = reference.experts(x, ids, weights, gate_up, down)
    assert got.dtype == torch.float32 and torch.allclose(got, slow_experts(x, ids, weights, gate_up, down), atol=1e-5)
    flipped = reference.experts(x, ids.flip(1), weights.flip(1), gate_up, down)
    assert torch.equal(flipped, got), "the sum runs in order of expert id, whatever the router's order"


def test_experts_of_no_rows():
    empty = reference.experts(
        torch.empty(0, 16), torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 3), rand(6, 20, 16), rand(6, 16, 10)
    )
    assert empty.shape == (0, 16)


def test_a_row_elsewhere_never_meets_the_garbage_of_others():
    """NaN in one row must stay in it."""
    x, ids = rand(4, 16), torch.tensor([[0, -1], [1, 0], [-1, -1], [1, 5]])
    x[1] = float("nan")
    got = reference.experts(x, ids, torch.ones(4, 2), rand(6, 20, 16), rand(6, 16, 10))
    assert got[1].isnan().all() and got[[0, 2, 3]].isfinite().all() and got[2].abs().max() == 0


def test_b149_int4_values_in_known_order():
    row = torch.arange(-8, 8).repeat(2).unsqueeze(0)
    packed = pack_int4(row)
    words = [int(w) & 0xFFFFFFFF for w in packed[0]]
    assert words == [0x76543210, 0xFEDCBA98] * 2, "lowest nibble first, value + 8"
    assert torch.equal(reference.unpack_int4(packed, torch.ones(1, 1)), row.float())


def test_b149_int4_of_a_known_word():
    """0xFEA98710 holds the nibbles 0, 1, 7, 8, 9, 10, 14, 15."""
    packed = torch.tensor([[0xFEA98710 - 2**32] * 4], dtype=torch.int32)
    values = [-8, -7, -1, 0, 1, 2, 6, 7] * 4
    assert reference.unpack_int4(packed, torch.tensor([[0.5]])).tolist() == [[v * 0.5 for v in values]]


def test_int4_scales_belong_to_groups_of_32_columns():
    packed = pack_int4(torch.ones(2, 96, dtype=torch.int64))
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert torch.equal(reference.unpack_int4(packed, scale), scale.repeat_interleave(32, dim=1))


def test_b150_int4_equals_the_compressed_tensors_package():
    """The same words, and the same weights in the checkpoint's own type."""
    q, scale = quantize_int4(rand(48, 128).bfloat16())
    packed = pack_to_int32(q, 4)
    assert torch.equal(packed, pack_int4(q))
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    theirs = dequantize(q, scale, torch.zeros_like(scale, dtype=torch.int8), args)
    ours = reference.unpack_int4(packed, scale)
    assert theirs.dtype == torch.bfloat16 and torch.equal(ours.bfloat16(), theirs)


BLOCK = 4


def ragged(seq_lens: list[int], query_lens: list[int], heads: int, latent: int, rope: int):
    """Queries, a cache in shuffled blocks that is NaN wherever no sequence owns it, and the batch."""
    width = latent + rope
    counts = [-(-n // BLOCK) for n in seq_lens]
    order = (torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    cache = torch.full((len(order) + 1, BLOCK, width), float("nan"))
    table = torch.zeros(len(seq_lens), max(counts), dtype=torch.int64)
    keys = []
    for n, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        table[n, :count] = torch.tensor([order.pop() for _ in range(count)])
        keys.append(rand(length, width, seed=10 + n))
        for position in range(length):
            cache[table[n, position // BLOCK], position % BLOCK] = keys[n][position]
    tokens = sum(query_lens)
    nothing = torch.zeros(tokens, dtype=torch.int64)
    batch = ForwardBatch(nothing, nothing, nothing, table, query_lens, seq_lens, None)
    return rand(tokens, heads, width, seed=5), cache, batch, keys


@pytest.mark.parametrize("name", ["reference"])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ([1], [1]),
        ([9], [9]),
        ([9], [4]),
        ([8, 4, 1], [1, 1, 1]),
        ([13, 1, 7, 16, 5], [1, 1, 7, 5, 2]),  # decodes, a first chunk, a later chunk, a verify
    ],
)
@pytest.mark.parametrize(("heads", "latent", "rope"), [(3, 8, 4), (2, 512, 64)])
def test_attention_over_a_paged_cache_equals_the_naive_form(name, seq_lens, query_lens, heads, latent, rope):
    q, cache, batch, keys = ragged(seq_lens, query_lens, heads, latent, rope)
    w_v = rand(heads, 5, latent, seed=6) / latent**0.5
    got = ATTENTION_BACKENDS[name]().attend(q, cache, batch, 0.3, w_v)
    start = 0
    for length, count, key in zip(seq_lens, query_lens, keys, strict=True):
        for i in range(count):
            seen = key[: length - count + 1 + i]
            scores = (q[start + i] @ seen.t() * 0.3).softmax(-1)
            expected = torch.einsum("hc,hvc->hv", scores @ seen[:, :latent], w_v)
            assert torch.allclose(got[start + i], expected, atol=2e-5)
        start += count


def test_store_writes_its_slots_and_nothing_else():
    cache, rows = torch.full((3, BLOCK, 6), 7.0), rand(2, 6)
    stored = reference.store_latent(cache, rows, torch.tensor([BLOCK + 1, 2 * BLOCK]), 4)
    expected = torch.full((3, BLOCK, 6), 7.0)
    expected[1, 1], expected[2, 0] = rows
    assert torch.equal(cache, expected) and torch.equal(stored, rows)


def test_naive_attention_of_the_last_queries():
    q, keys, values = rand(3, 2, 6), rand(7, 2, 6, seed=1), rand(7, 2, 5, seed=2)
    got = reference.mla_naive(q, keys, values, 0.4)
    for t in range(3):
        for h in range(2):
            seen = slice(0, 7 - 3 + t + 1)
            probs = (keys[seen, h] @ q[t, h] * 0.4).softmax(-1)
            assert torch.allclose(got[t, h], probs @ values[seen, h], atol=1e-6)


def test_rotation_turns_halves():
    x, angles = rand(5, 3, 8), rand(5, 4, seed=1)
    got = reference.rotate_halves(x, torch.polar(torch.full_like(angles, 1.5), angles))
    for t in range(5):
        for i in range(4):
            cos, sin = 1.5 * math.cos(angles[t, i]), 1.5 * math.sin(angles[t, i])
            a, b = x[t, :, i], x[t, :, i + 4]
            assert torch.allclose(got[t, :, i], a * cos - b * sin, atol=1e-6)
            assert torch.allclose(got[t, :, i + 4], a * sin + b * cos, atol=1e-6)
    assert reference.rotate_halves(x.bfloat16(), torch.polar(angles, angles)).dtype == torch.bfloat16


def test_attention_over_heads_in_pages():
    """Against one head and one key at a time; pages are NaN where nothing is stored, one request is padding."""
    heads, groups, width, page, lengths = 6, 2, 4, 3, [5, 0, 3]
    cache = torch.full((6, page, 2 * groups * width), float("nan"))
    table = torch.tensor([[4, 2], [0, 0], [1, 0]])
    keys, values, q = rand(8, groups, width), rand(8, groups, width, seed=1), rand(3, heads, width, seed=2)
    slots = [int(table[n, t // page]) * page + t % page for n, length in enumerate(lengths) for t in range(length)]
    reference.store_heads(cache, keys, values, torch.tensor(slots))
    assert cache.isnan().any(-1).sum() == 6 * page - 8, "each token's whole row is written, and no other"
    got = reference.attend_heads(q, cache, table, torch.tensor(lengths, dtype=torch.int32), 0.3)
    assert got[1].abs().max() == 0
    for n, rows in ((0, range(5)), (2, range(5, 8))):
        for head in range(heads):
            group = head // (heads // groups)
            scores = [math.exp(0.3 * float(q[n, head] @ keys[t, group])) for t in rows]
            expected = sum(s / sum(scores) * values[t, group] for s, t in zip(scores, rows, strict=True))
            assert torch.allclose(got[n, head], expected, atol=1e-5)
