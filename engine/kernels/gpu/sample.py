"""From logits to tokens on the device: greedy, and temperature, min_p, top_k, top_p with the noise of the plain twin.

The twin is engine/sampling.py. Scaled logits z = (logit - max) / temperature have its bits (IEEE subtraction and
division), so min_p and top_k keep its set exactly, ties included (lowest index first). top_p compares sums of float32
probabilities that the twin adds in another order: a token whose probability before it equals p within some 1e-6 may
fall on the other side. The noise has the twin's random bits; its two logarithms may differ in the last place.

Shape letters: S rows, V vocabulary, P parts of a row that programs take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.pdl import launch_options, wait

PART = 2048
CHUNK = 4096
_NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _first_best(values, indices, inside):
    """Largest value and the lowest index inside that holds it; _NOWHERE among NaN alone."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where((values == best) & inside, indices, _NOWHERE), axis=0)


@triton.jit
def _token(index):
    """Token 0 for a row of NaN, which equals nothing: an id of the vocabulary, so that only its request suffers."""
    return tl.where(index == _NOWHERE, 0, index).to(tl.int64)


@triton.jit
def _part_best(logits, best_values, best_ids, vocab, stride, parts, PART: tl.constexpr, PDL: tl.constexpr):
    """Program (row, part): the best of the part."""
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    wait(PDL)
    values = tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < vocab, other=float("-inf"))
    best, index = _first_best(values, columns, columns < vocab)
    tl.store(best_values + row * parts + part, best)
    tl.store(best_ids + row * parts + part, index)


@triton.jit
def _row_best(best_values, best_ids, maxima, tokens, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    """Program row: the best of its parts; on a tie the first part's."""
    row = tl.program_id(0)
    at = tl.arange(0, PARTS)
    wait(PDL)
    values = tl.load(best_values + row * parts + at, mask=at < parts, other=float("-inf"))
    ids = tl.load(best_ids + row * parts + at, mask=at < parts, other=_NOWHERE)
    best, index = _first_best(values, ids, at < parts)
    tl.store(maxima + row, best)
    tl.store(tokens + row, _token(index))


@triton.jit
def _scaled(logits, columns, vocab, maximum, temperature, log_min_p):
    """z of the columns: -inf outside the vocabulary and below min_p."""
    values = tl.load(logits + columns, mask=columns < vocab, other=float("-inf"))
    scaled = tl.div_rn(values - maximum, tl.zeros_like(values) + temperature)
    return tl.where(scaled < log_min_p, float("-inf"), scaled)


@triton.jit
def _key(scaled):
    """An integer that grows as z <= 0 falls: 0 for the best, 0x7F800000 for -inf."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def _weigh(logits, vocab: tl.constexpr, maximum, temperature, log_min_p, key, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Number (COUNT) or unnormalised probability of the tokens whose key is below `key`; sums in a fixed order."""
    total = tl.zeros([CHUNK], dtype=tl.float32)
    for first in range(0, vocab, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        scaled = _scaled(logits, columns, vocab, maximum, temperature, log_min_p)
        weight = tl.exp(scaled)
        if COUNT:
            weight = tl.where(columns < vocab, 1.0, 0.0)
        total += tl.where(_key(scaled) < key, weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _weigh_three(
    logits, vocab: tl.constexpr, maximum, temperature, log_min_p, key, step, COUNT: tl.constexpr, CHUNK: tl.constexpr
):
    """The same for key + step, key + 2 step and key + 3 step."""
    first_total = tl.zeros([CHUNK], dtype=tl.float32)
    second_total = tl.zeros([CHUNK], dtype=tl.float32)
    third_total = tl.zeros([CHUNK], dtype=tl.float32)
    for first in range(0, vocab, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        scaled = _scaled(logits, columns, vocab, maximum, temperature, log_min_p)
        weight = tl.exp(scaled)
        if COUNT:
            weight = tl.where(columns < vocab, 1.0, 0.0)
        keys = _key(scaled)
        first_total += tl.where(keys < key + step, weight, 0.0)
        second_total += tl.where(keys < key + 2 * step, weight, 0.0)
        third_total += tl.where(keys < key + 3 * step, weight, 0.0)
    return tl.sum(first_total, axis=0), tl.sum(second_total, axis=0), tl.sum(third_total, axis=0)


@triton.jit
def _search(
    logits,
    vocab: tl.constexpr,
    maximum,
    temperature,
    log_min_p,
    limit,
    target,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Largest key <= limit such that what lies below it weighs less than `target`: the key that the target falls in.

    Sign and bit 30 first, then two bits a pass over the row."""
    half = 1 << 30
    above = _weigh(logits, vocab, maximum, temperature, log_min_p, half, COUNT, CHUNK)
    key = tl.where((above < target) & (half <= limit), half, 0)
    for done in range(15):
        step = 1 << (28 - 2 * done)
        one, two, three = _weigh_three(logits, vocab, maximum, temperature, log_min_p, key, step, COUNT, CHUNK)
        times = ((one < target) & (key + step <= limit)).to(tl.int32)
        times += ((two < target) & (key + 2 * step <= limit)).to(tl.int32)
        times += ((three < target) & (key + 3 * step <= limit)).to(tl.int32)
        key += times * step
    return key


@triton.jit
def _last_tie(logits, vocab: tl.constexpr, maximum, temperature, log_min_p, key, keep, CHUNK: tl.constexpr):
    """Index of the `keep`-th token (from 1) that has exactly this key."""
    found, before = -1, 0
    for first in range(0, vocab, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        scaled = _scaled(logits, columns, vocab, maximum, temperature, log_min_p)
        ties = ((_key(scaled) == key) & (columns < vocab)).to(tl.int32)
        place = before + tl.cumsum(ties, axis=0)
        found = tl.maximum(found, tl.max(tl.where((ties > 0) & (place <= keep), columns, -1), axis=0))
        before += tl.sum(ties, axis=0)
    return found


@triton.jit
def _cut(
    logits,
    maxima,
    temperatures,
    top_ks,
    top_ps,
    log_min_ps,
    cut_keys,
    cut_ids,
    stride,
    vocab: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program row: the last token that top_k and top_p keep, as its key and index; all are kept without them."""
    row = tl.program_id(0)
    wait(PDL)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, log_min_p = tl.load(top_ps + row), tl.load(log_min_ps + row)
    maximum = tl.load(maxima + row)
    logits += row.to(tl.int64) * stride
    key, last = row * 0 + _NOWHERE, row * 0 + _NOWHERE
    if temperature > 0:
        if (top_k > 0) & (top_k < vocab):
            target = top_k.to(tl.float32)
            key = _search(logits, vocab, maximum, temperature, log_min_p, key, target, True, CHUNK)
            above = _weigh(logits, vocab, maximum, temperature, log_min_p, key, True, CHUNK)
            last = _last_tie(logits, vocab, maximum, temperature, log_min_p, key, top_k - above.to(tl.int32), CHUNK)
        if top_p < 1:
            # What top_k keeps weighs all above its key and the ties that it keeps there.
            above = _weigh(logits, vocab, maximum, temperature, log_min_p, key, False, CHUNK)
            each = tl.exp(-key.to(tl.float32, bitcast=True))
            total = above
            if key < _NOWHERE:
                kept = top_k - _weigh(logits, vocab, maximum, temperature, log_min_p, key, True, CHUNK).to(tl.int32)
                total += each * kept.to(tl.float32)
            target = top_p * total
            key_p = _search(logits, vocab, maximum, temperature, log_min_p, key, target, False, CHUNK)
            above = _weigh(logits, vocab, maximum, temperature, log_min_p, key_p, False, CHUNK)
            each = tl.exp(-key_p.to(tl.float32, bitcast=True))
            # The first tie stands at `above` < target; the others follow while the sum before them is below it.
            keep = tl.maximum(tl.ceil(tl.div_rn(target - above, tl.maximum(each, 1e-37))), 1.0)
            keep = tl.minimum(keep, vocab * 1.0).to(tl.int32)
            last_p = _last_tie(logits, vocab, maximum, temperature, log_min_p, key_p, keep, CHUNK)
            last = tl.where(key_p < key, last_p, tl.minimum(last, last_p))
            key = key_p
    tl.store(cut_keys + row, key)
    tl.store(cut_ids + row, last)


@triton.jit
def _uniform(seed, place, first, PART: tl.constexpr):
    """The twin's float32 in (0, 1) for tokens first .. first + PART; Philox gives four a counter."""
    counters = (first // 4 + tl.arange(0, PART // 4)).to(tl.uint32)
    zeros = tl.zeros_like(counters)
    low, high = zeros + (place & 0xFFFFFFFF).to(tl.uint32), zeros + (place >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counters, low, high, zeros)
    bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [PART])
    return ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _part_draw(
    logits,
    maxima,
    temperatures,
    log_min_ps,
    seeds,
    places,
    cut_keys,
    cut_ids,
    best_values,
    best_ids,
    vocab,
    stride,
    parts,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, part): the best of the part with noise on it, among the tokens that are kept."""
    row, part = tl.program_id(0), tl.program_id(1)
    wait(PDL)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        columns = part * PART + tl.arange(0, PART)
        logits += row.to(tl.int64) * stride
        scaled = _scaled(logits, columns, vocab, tl.load(maxima + row), temperature, tl.load(log_min_ps + row))
        key, cut = _key(scaled), tl.load(cut_keys + row)
        kept = (key < cut) | ((key == cut) & (columns <= tl.load(cut_ids + row)))
        noise = -tl.log(-tl.log(_uniform(tl.load(seeds + row), tl.load(places + row), part * PART, PART)))
        drawn = tl.where(kept & (columns < vocab), scaled + noise, float("-inf"))
        best, index = _first_best(drawn, columns, columns < vocab)
        tl.store(best_values + row * parts + part, best)
        tl.store(best_ids + row * parts + part, index)


@triton.jit
def _row_draw(best_values, best_ids, temperatures, tokens, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    """Program row: the best of its parts, unless the row is greedy and has its token."""
    row = tl.program_id(0)
    at = tl.arange(0, PARTS)
    wait(PDL)
    if tl.load(temperatures + row) > 0:
        values = tl.load(best_values + row * parts + at, mask=at < parts, other=float("-inf"))
        ids = tl.load(best_ids + row * parts + at, mask=at < parts, other=_NOWHERE)
        _, index = _first_best(values, ids, at < parts)
        tl.store(tokens + row, _token(index))


def greedy(logits_SV: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    """Writes each row's most likely token, the lowest id of equals, into tokens_S (int64).

    logits_SV: float32, rows apart by any stride. Returns the rows' maxima, float32 [S]."""
    rows, vocab = logits_SV.shape
    parts, values, ids = _parts(logits_SV)
    maxima_S = torch.empty(rows, dtype=torch.float32, device=logits_SV.device)
    options = launch_options(logits_SV.device)
    _part_best[rows, parts](logits_SV, values, ids, vocab, logits_SV.stride(0), parts, PART=PART, **options)
    _row_best[rows,](values, ids, maxima_S, tokens_S, parts, PARTS=triton.next_power_of_2(parts), **options)
    return maxima_S


def draw(logits_SV: torch.Tensor, maxima_S: torch.Tensor, rows, tokens_S: torch.Tensor) -> None:
    """Draws a token for every row of temperature above 0 and writes it into tokens_S (int64); leaves the others.

    rows: temperature, top_k, top_p, log_min_p, seeds, places as in sampling.SamplingRows; maxima_S from `greedy`."""
    count, vocab = logits_SV.shape
    parts, values, ids = _parts(logits_SV)
    cut_keys = torch.empty(count, dtype=torch.int32, device=logits_SV.device)
    cut_ids = torch.empty_like(cut_keys)
    stride, options = logits_SV.stride(0), launch_options(logits_SV.device)
    filters = (rows.temperature, rows.top_k, rows.top_p, rows.log_min_p)
    _cut[count,](
        logits_SV, maxima_S, *filters, cut_keys, cut_ids, stride, vocab=vocab, CHUNK=CHUNK, num_warps=16, **options
    )
    noise = (rows.temperature, rows.log_min_p, rows.seeds, rows.places)
    _part_draw[count, parts](
        logits_SV, maxima_S, *noise, cut_keys, cut_ids, values, ids, vocab, stride, parts, PART=PART, **options
    )
    _row_draw[count,](values, ids, rows.temperature, tokens_S, parts, PARTS=triton.next_power_of_2(parts), **options)


def _parts(logits_SV: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    count, vocab = logits_SV.shape
    parts = triton.cdiv(vocab, PART)
    values = torch.empty(count, parts, dtype=torch.float32, device=logits_SV.device)
    return parts, values, torch.empty(count, parts, dtype=torch.int32, device=logits_SV.device)


def compile_cases(capability: tuple[int, int]) -> list[tuple[str, object, dict, dict, dict]]:
    """(name, kernel, signature, constexprs, options) of every kernel here, as the wrappers launch it."""
    pdl = {"PDL": capability >= (9, 0)}
    f, i, long = "*fp32", "*i32", "*i64"
    best = {"best_values": f, "best_ids": i}
    whole = {"vocab": "i32", "stride": "i32"}
    cuts = {"cut_keys": i, "cut_ids": i}
    filters = {"temperatures": f, "top_ks": i, "top_ps": f, "log_min_ps": f}
    noise = {"temperatures": f, "log_min_ps": f, "seeds": long, "places": long}
    maxima, tokens, parts = {"maxima": f}, {"tokens": long}, {"parts": "i32"}
    row = {"PARTS": 128} | pdl
    part = {"PART": PART} | pdl
    cut = {"vocab": 163840, "CHUNK": CHUNK} | pdl
    logits = {"logits": f}
    return [
        ("part_best", _part_best, logits | best | whole | parts, part, {}),
        ("row_best", _row_best, best | maxima | tokens | parts, row, {}),
        ("cut", _cut, logits | maxima | filters | cuts | {"stride": "i32"}, cut, {"num_warps": 16}),
        ("part_draw", _part_draw, logits | maxima | noise | cuts | best | whole | parts, part, {}),
        ("row_draw", _row_draw, best | {"temperatures": f} | tokens | parts, row, {}),
    ]
