"""Checks of the products, norms, latents and the router's choice against their twins, at any shapes on any device.

Every check takes a Bench, which says where and in which type; outputs are poisoned before the kernels write them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.kernels import reference
from engine.kernels.gpu import dense, latent, norm, route
from engine.kernels.gpu.experts_plan import BLOCK_ROWS, plan_blocks
from engine.kernels.kv_layout import FP8
from engine.kernels.reference_kernels import ReferenceKernels
from engine.kernels.table import Routing
from tests.mla_cases import relative_error

EPS = 1e-5
POISON = -7777
_EMPTY, _EMPTY_LIKE = torch.empty, torch.empty_like


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors hold NaN, or a number that nothing here gives."""

    def fill(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else POISON)

    torch.empty = lambda *args, **kwargs: fill(_EMPTY(*args, **kwargs))
    torch.empty_like = lambda *args, **kwargs: fill(_EMPTY_LIKE(*args, **kwargs))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = _EMPTY, _EMPTY_LIKE


@dataclass
class Bench:
    """`bound`: of the relative error that one rounding to `dtype` leaves."""

    device: str
    dtype: torch.dtype
    bound: float

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed + sum(shape))
        return torch.randn(*shape, generator=generator, device=self.device).to(dtype or self.dtype)

    def weight(self, outputs: int, inputs: int, seed: int = 1) -> torch.Tensor:
        return (self.random(outputs, inputs, seed=seed).float() / inputs**0.5).to(self.dtype)

    def cis(self, rows: int, rope: int) -> torch.Tensor:
        angles = torch.arange(rows, device=self.device).unsqueeze(1) * 0.7 + torch.arange(rope // 2, device=self.device)
        return torch.polar(torch.ones_like(angles), angles)


def angles_of(cis: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(cis).flatten(-2)


def split_product(x_TI: torch.Tensor, weight_OI: torch.Tensor, parts: int) -> torch.Tensor:
    """What linear_parts gives, made by PyTorch."""
    pieces = zip(x_TI.float().chunk(parts, 1), weight_OI.float().chunk(parts, 1), strict=True)
    return torch.stack([x @ w.t() for x, w in pieces])


def check_linear(bench: Bench, rows: int, outputs: int, inputs: int, tile: dense.Tile) -> None:
    x, weight = bench.random(rows, inputs), bench.weight(outputs, inputs)
    with poisoned():
        parts = dense.linear_parts(x, weight, tile)
        whole = dense.linear_parts(x, weight, tile, bench.dtype)
    assert parts.dtype == torch.float32 and parts.shape == (tile.parts, rows, outputs)
    assert relative_error(parts, split_product(x, weight, tile.parts)) < 5e-5
    assert whole.dtype == bench.dtype and torch.equal(whole, parts.to(bench.dtype))


def check_rows_that_lie_apart(bench: Bench, rows: int, inputs: int) -> None:
    """A part of wider rows gives the bits of its copy."""
    wide, weight = bench.random(rows, 3 * inputs), bench.weight(33, inputs)
    tile, x = dense.Tile(block_o=32, block_i=32, stages=1), wide[:, inputs : 2 * inputs]
    with poisoned():
        assert torch.equal(dense.linear_parts(x, weight, tile), dense.linear_parts(x.contiguous(), weight, tile))
        assert torch.equal(norm.rms_norm(x, weight[0], EPS), norm.rms_norm(x.contiguous(), weight[0], EPS))


def check_add_norm(bench: Bench, rows: int, width: int, parts: int, dtype: torch.dtype) -> None:
    """parts 0: a partial sum that was not split."""
    shape = (parts, rows, width) if parts else (rows, width)
    partial, residual = bench.random(*shape, dtype=dtype), bench.random(rows, width, seed=3)
    weight = bench.random(width, seed=4)
    with poisoned():
        x, new = norm.add_norm(partial, residual, weight, EPS)
    expected_x, expected = reference.add_norm(partial, residual, weight, EPS)
    assert torch.equal(new, expected), "the sum has one order and two roundings"
    assert relative_error(x, expected_x) < bench.bound


def check_sum_parts(bench: Bench, rows: int, width: int, parts: int, dtype: torch.dtype) -> None:
    partial = bench.random(parts, rows, width, dtype=dtype)
    with poisoned():
        out = norm.sum_parts(partial, bench.dtype)
    assert torch.equal(out, reference.add_parts(partial).to(bench.dtype)), "one order, one rounding"


def check_rms_norm(bench: Bench, rows: int, width: int) -> None:
    x, weight = 3 * bench.random(rows, width), bench.random(width, seed=4)
    with poisoned():
        out = norm.rms_norm(x, weight, EPS)
    assert relative_error(out, reference.rms_norm(x, weight, EPS)) < bench.bound


def check_silu_mul(bench: Bench, rows: int, width: int) -> None:
    gate_up = 2 * bench.random(rows, 2 * width)
    with poisoned():
        out = norm.silu_mul(gate_up)
    assert relative_error(out, reference.silu_mul(gate_up)) < bench.bound


def check_latents_to_bytes(bench: Bench, rows: int, widths: tuple[int, int, int], parts: int) -> None:
    """Each row is what the layout makes of the row that a plain cache gets, and is handed on as it is read."""
    query, kv, rope = widths
    parts_PTW = split_product(bench.random(rows, 64), bench.weight(sum(widths), 64), parts)
    norms, cis = (bench.random(query, seed=5), bench.random(kv, seed=6)), bench.cis(rows, rope)
    slots = torch.randperm(3 * rows, generator=torch.Generator().manual_seed(rows))[:rows].to(bench.device)
    plain = torch.zeros(3, rows, kv + rope, dtype=bench.dtype, device=bench.device)
    cache = torch.full((3, rows, FP8.width(kv, rope)), 255, dtype=torch.uint8, device=bench.device)
    with poisoned():
        q, new = latent.latents(parts_PTW, norms[0], norms[1], EPS, angles_of(cis), cache, slots)
        expected_q, exact = latent.latents(parts_PTW, norms[0], norms[1], EPS, angles_of(cis), plain, slots)
    read = FP8.unpack(cache.flatten(0, 1)[slots], kv, rope, torch.float32)
    expected = FP8.unpack(FP8.pack(exact, kv), kv, rope, torch.float32)
    down = exact[:, kv:].float().abs() / 128 if bench.device == "cpu" else 0  # so the interpreter rounds to bfloat16
    assert torch.equal(q, expected_q) and torch.equal(new.float(), read.to(bench.dtype).float())
    assert torch.equal(read[:, :kv], expected[:, :kv]) and not torch.equal(read[:, :kv], exact[:, :kv].float())
    assert ((read - expected)[:, kv:].abs() <= down).all()
    assert int((cache != 255).any(-1).sum()) == rows, "other slots stay as they were"


def check_latents(bench: Bench, rows: int, widths: tuple[int, int, int], parts: int, with_query_norm: bool) -> None:
    """widths: of the query's latent, which may be 0, of the keys' latent, of the roped key."""
    query, kv, rope = widths
    inputs = 64
    x, weight = bench.random(rows, inputs), bench.weight(sum(widths), inputs)
    q_norm = bench.random(query, seed=5) if with_query_norm else None
    kv_norm, cis = bench.random(kv, seed=6), bench.cis(rows, rope)
    slots = torch.randperm(3 * rows, generator=torch.Generator().manual_seed(rows))[:rows].to(bench.device)
    cache = torch.full((3, rows, kv + rope), float(POISON), dtype=bench.dtype, device=bench.device)
    expected_cache = cache.clone()
    with poisoned():
        q, new = latent.latents(
            split_product(x, weight, parts), q_norm, kv_norm, EPS, angles_of(cis), cache, slots
        )  # fmt: skip
    expected_q, expected = ReferenceKernels().latents(x, weight, q_norm, kv_norm, EPS, cis, expected_cache, slots)
    assert q.shape == expected_q.shape and (not query or relative_error(q, expected_q) < 2 * bench.bound)
    assert relative_error(new, expected) < 2 * bench.bound
    assert torch.equal(cache.view(-1, kv + rope)[slots], new)
    assert int((cache != POISON).any(-1).sum()) == rows, "other slots stay as they were"


def check_absorb(bench: Bench, rows: int, heads: int, widths: tuple[int, int, int], parts: int) -> None:
    """widths: nope, rope, latent. The heads of W_k lie apart in a larger matrix."""
    nope, rope, kv = widths
    inputs = 64
    q, weight = bench.random(rows, inputs), bench.weight(heads * (nope + rope), inputs)
    w_k = bench.weight(heads * (nope + 16), kv).view(heads, nope + 16, kv)[:, :nope]
    cis = bench.cis(rows, rope)
    with poisoned():
        out = latent.absorb(split_product(q, weight, parts), w_k, angles_of(cis))
    expected = ReferenceKernels().absorbed_queries(q, weight, w_k, cis)
    assert out.shape == (rows, heads, kv + rope) and relative_error(out, expected) < 2 * bench.bound


def check_rope(bench: Bench, rows: int, heads: int, nope: int, rope: int) -> None:
    q, cis = bench.random(rows, heads, nope + rope), bench.cis(rows, rope)
    expected = torch.cat([q[..., :nope], reference.rotate_pairs(q[..., nope:], cis)], -1)
    with poisoned():
        out = latent.rope_in_place(q, nope, angles_of(cis))
    assert out is q and torch.equal(out[..., :nope], expected[..., :nope])
    assert relative_error(out, expected) < bench.bound


@dataclass
class Router:
    """A router of `experts` experts whose rank holds `local`; `shared` columns of the shared expert, 0 for none."""

    experts: int
    top_k: int
    local: range
    shared: int = 0
    normalize: bool = True
    scale: float = 2.5

    def logits(self, bench: Bench, rows: int, parts: int) -> torch.Tensor:
        return bench.random(parts, rows, self.experts + 2 * self.shared, seed=7, dtype=torch.float32)

    def bias(self, bench: Bench) -> torch.Tensor:
        return 0.3 * bench.random(self.experts, seed=8, dtype=torch.float32)

    def run(
        self,
        bench: Bench,
        parts_PTW: torch.Tensor,
        bias_E: torch.Tensor,
        num_tokens: int,
        counts_E: torch.Tensor | None = None,
    ) -> Routing:
        count = torch.tensor([num_tokens], dtype=torch.int32, device=bench.device)
        with poisoned():
            return route.route(
                parts_PTW, bias_E, count, self.local, self.top_k, self.normalize, self.scale, bench.dtype, counts_E
            )

    def expected_weights(self, scores_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK * self.scale


def check_route(bench: Bench, router: Router, rows: int, parts: int, num_tokens: int) -> None:
    """The best experts in falling order (by scores, since near-ties may go either way), their weights, and -1s."""
    logits, bias = router.logits(bench, rows, parts), router.bias(bench)
    scores_TE = reference.add_parts(logits)[:, : router.experts].sigmoid()
    every_id, weights, shared, _ = replace(router, local=range(router.experts)).run(bench, logits, bias, rows)
    every_id = every_id.long()
    best = (scores_TE + bias).topk(router.top_k, sorted=True).values
    assert torch.allclose((scores_TE + bias).gather(1, every_id), best, rtol=0, atol=1e-6)
    assert all(len(set(row)) == router.top_k for row in every_id.tolist())
    assert relative_error(weights, router.expected_weights(scores_TE, every_id)) < 1e-5
    ids, same_weights, *_ = router.run(bench, logits, bias, num_tokens)
    count = torch.tensor([num_tokens], device=bench.device)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), reference.local_ids(every_id, router.local, count))
    assert torch.equal(weights, same_weights) and shared.shape == (rows, router.shared)
    _, twin_weights = reference.route(
        reference.add_parts(logits)[:, : router.experts], bias, router.top_k, router.normalize, router.scale
    )
    assert torch.allclose(weights.sort(-1).values, twin_weights.sort(-1).values, rtol=1e-4)
    if router.shared:
        gate_up = reference.add_parts(logits)[:, router.experts :].to(bench.dtype)
        assert relative_error(shared, reference.silu_mul(gate_up)) < bench.bound


def check_route_counts(bench: Bench, router: Router, rows: int, num_tokens: int) -> None:
    """Every choice of a row that is no padding is added to what is there, wherever its expert is; ids stay the same."""
    logits, bias = router.logits(bench, rows, 2), router.bias(bench)
    every_id = replace(router, local=range(router.experts)).run(bench, logits, bias, rows).ids_TK.long()
    before = 2**40 + torch.arange(router.experts, device=bench.device)
    expected, counts = before.clone(), before.clone()
    tokens = torch.tensor([num_tokens], dtype=torch.int32, device=bench.device)
    reference.count_experts(every_id, tokens, expected)
    chosen = every_id[:num_tokens].flatten().bincount(minlength=router.experts)
    assert torch.equal(expected, before + chosen) and int(chosen.sum()) == num_tokens * router.top_k
    plain = router.run(bench, logits, bias, num_tokens)
    counted = router.run(bench, logits, bias, num_tokens, counts)
    assert torch.equal(counts, expected)
    assert torch.equal(plain.ids_TK, counted.ids_TK) and torch.equal(plain.weights_TK, counted.weights_TK)


def check_plan_of_one_row(bench: Bench, router: Router) -> None:
    """The router's plan of a single row is what the plan's own kernel makes of its choice."""
    routing = router.run(bench, router.logits(bench, 1, 2), router.bias(bench), 1)
    made = plan_blocks(routing.ids_TK, routing.weights_TK, len(router.local), BLOCK_ROWS)
    count = int(made.num_blocks)
    assert count == int(routing.plan.num_blocks) == int((routing.ids_TK >= 0).sum())
    for name in ("block_experts", "block_sizes", "slot_weights"):
        assert torch.equal(getattr(made, name)[:count], getattr(routing.plan, name)[:count]), name
    assert torch.equal(made.rows[:count, 0], routing.plan.rows[:count, 0])
    assert router.run(bench, router.logits(bench, 2, 2), router.bias(bench), 2).plan is None


def check_route_of_low_scores(bench: Bench, experts: int, top_k: int) -> None:
    """A bias far below any score moves all of them alike: nobody is lost."""
    router = Router(experts, top_k, range(experts))
    logits = router.logits(bench, 2, 1)
    expected = router.run(bench, logits, torch.zeros(experts, device=bench.device), 2)
    shifted = router.run(bench, logits, torch.full((experts,), -300.0, device=bench.device), 2)
    assert (shifted.ids_TK >= 0).all() and all(len(set(row)) == top_k for row in shifted.ids_TK.tolist())
    lowered = router.run(bench, logits, torch.full((experts,), -3.0, device=bench.device), 2)
    assert torch.equal(lowered.ids_TK, expected.ids_TK)


def check_route_ties(bench: Bench, experts: int, top_k: int) -> None:
    """Equal scores go to the lowest experts; a bias decides who, not how much."""
    router = Router(experts, top_k, range(experts))
    flat = torch.zeros(1, 3, experts, device=bench.device)
    ids, weights, *_ = router.run(bench, flat, torch.zeros(experts, device=bench.device), 3)
    assert torch.equal(ids.cpu(), torch.arange(top_k, dtype=torch.int32).expand(3, -1))
    assert torch.allclose(weights, torch.full_like(weights, router.scale / top_k))
    bias = torch.zeros(experts, device=bench.device)
    bias[experts - 1] = 0.1
    ids, weights, *_ = router.run(bench, flat, bias, 3)
    assert ids[0].tolist() == [experts - 1, *range(top_k - 1)]
    assert torch.allclose(weights, torch.full_like(weights, router.scale / top_k))


def rows_of_everything(bench: Bench, rows: int, sizes: dict[str, int], tile: dense.Tile) -> dict[str, torch.Tensor]:
    """Every kernel's result for the first `rows` of 64 rows; sizes: inputs, outputs, nope, kv, rope."""
    inputs, nope, kv, rope = (sizes[name] for name in ("inputs", "nope", "kv", "rope"))
    heads = 2
    x = bench.random(64, inputs)[:rows].contiguous()
    cis = angles_of(bench.cis(64, rope)[:rows])
    with poisoned():
        product = dense.linear_parts(x, bench.weight(sizes["outputs"], inputs), tile)
        kv_parts = dense.linear_parts(x, bench.weight(kv + kv + rope, inputs), tile)
        q_parts = dense.linear_parts(x, bench.weight(heads * (nope + rope), inputs), tile)
        cache = torch.zeros(1, 64, kv + rope, dtype=bench.dtype, device=bench.device)
        norms = bench.random(kv, seed=6)
        slots = torch.arange(rows, device=bench.device)
        q, latents = latent.latents(kv_parts, norms, norms, EPS, cis, cache, slots)
        absorbed = latent.absorb(q_parts, bench.weight(heads * nope, kv).view(heads, nope, kv), cis)
        out, residual = norm.add_norm(
            product, bench.random(64, sizes["outputs"], seed=9)[:rows].contiguous(),
            bench.random(sizes["outputs"], seed=4), EPS,
        )  # fmt: skip
        router = Router(sizes["outputs"], 4, range(sizes["outputs"]))
        ids, weights, *_ = router.run(bench, product, router.bias(bench), rows)
    results = {"product": product.transpose(0, 1), "q": q, "latents": latents, "absorbed": absorbed, "out": out}
    return results | {"residual": residual, "ids": ids, "weights": weights}


def check_rows_do_not_depend_on_others(
    bench: Bench, sizes: dict[str, int], tile: dense.Tile, counts: tuple[int, ...]
) -> None:
    whole = rows_of_everything(bench, max(counts), sizes, tile)
    for rows in counts:
        for name, result in rows_of_everything(bench, rows, sizes, tile).items():
            assert torch.equal(result, whole[name][:rows]), (name, rows)
