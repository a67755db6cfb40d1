"""All ranks of a world on one device, in one launch: the exchange kernels with their peers' memory side by side.

Under the interpreter programs run one after another, so that each phase is a launch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bench.virtual_world import VirtualWorld
from engine.kernels.gpu import channel as ch
from engine.kernels.gpu import push_linear
from engine.kernels.gpu.channel import Shape
from engine.kernels.reference import add_norm, add_parts, local_ids

EPS = 1e-5


@dataclass
class World:
    """P ranks with rows of one width; draws its inputs from a seed."""

    ranks: int
    capacity: int
    width: int
    dtype: torch.dtype
    device: str
    top_k: int = 8
    experts: int = 8
    group: int = 1
    limit_seconds: float = 5.0

    def __post_init__(self):
        shape = Shape(self.ranks, self.capacity, self.width, self.dtype, self.top_k)
        world = VirtualWorld(shape, torch.device(self.device), self.limit_seconds)
        self.memory, self.alarm = world.memory, world.alarm
        self.once, self.twice, self.local, self.back, self.out = (
            world.once, world.twice, world.local, world.back, world.out
        )  # fmt: skip
        self.generator = torch.Generator(self.device).manual_seed(7)
        self.weight = self.draw(self.width).to(self.dtype)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def partials(self, num_rows: int, parts: int) -> torch.Tensor:
        """[V, S, T, D]; some are zero, so that minus zero occurs among the sums."""
        partial = self.draw(self.ranks, parts, num_rows, self.width)
        return torch.where(partial.abs() < 0.2, -0.0, partial)

    def check(self) -> None:
        assert not self.alarm.failed_V.any(), f"gave up waiting for {self.alarm.late_V2P.tolist()}"

    def shares(self, x_TD: torch.Tensor, share: int) -> torch.Tensor:
        """[V, t, D]: each rank's rows, the last ones' missing rows NaN."""
        whole = x_TD.new_full((self.ranks * share, *x_TD.shape[1:]), float("nan"))
        whole[: x_TD.shape[0]] = x_TD
        return whole.unflatten(0, (self.ranks, share))


def launch(function, device: str, out: tuple, *args, **kwargs):
    """All phases at a time on a GPU; one launch each under the interpreter."""
    if device != "cpu":
        return function(*args, out=out, **kwargs)
    for phase in (1, 2, 4, 8):
        function(*args, out=out, phases=phase, **kwargs)
    return out


def expected_sum(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 [T, D] of partials [V, S, T, D]: each rank's parts rounded once, then added in the order of ranks."""
    return add_parts(torch.stack([add_parts(one).to(dtype) for one in partial]))


def norm_of(world: World, total: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return add_norm(total, residual, world.weight, EPS)


def close(world: World, got: torch.Tensor, expected: torch.Tensor) -> bool:
    """The norm's square sum is added in another order, which may round a value of a short type the other way."""
    step = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[world.dtype]
    return torch.allclose(got.float(), expected.float(), rtol=step, atol=1e-5)


def check_one_shot(world: World, num_rows: int, parts: int = 1) -> torch.Tensor:
    """Residuals to the bit, the norm within rounding, all ranks alike. Returns x [T, D]."""
    partial = world.partials(num_rows, parts)
    residual = world.draw(num_rows, world.width).to(world.dtype)
    everyone = residual.repeat(world.ranks, 1, 1)
    out = torch.full_like(everyone, float("nan")), torch.full_like(everyone, float("nan"))
    x, new = launch(ch.one_shot, world.device, out, partial, everyone, world.weight, EPS, world.once)
    world.check()
    expected_x, expected = norm_of(world, expected_sum(partial, world.dtype), residual)
    assert torch.equal(new, expected.expand_as(new))
    assert close(world, x[0], expected_x) and torch.equal(x, x[:1].expand_as(x))
    return x[0]


def check_two_shot(world: World, num_rows: int, parts: int = 1, gather: bool = True) -> torch.Tensor:
    share = -(-num_rows // world.ranks)
    partial = world.partials(num_rows, parts)
    residual = world.draw(num_rows, world.width).to(world.dtype)
    residuals = world.shares(residual, share)
    x = residuals.new_full((world.ranks, num_rows if gather else share, world.width), float("nan"))
    out = x, torch.full_like(residuals, float("nan"))
    channel = world.twice if gather else world.local
    args = (partial, residuals, world.weight, EPS, channel, num_rows)
    x, new = launch(ch.two_shot, world.device, out, *args, gather=gather)
    world.check()
    expected_x, expected = norm_of(world, expected_sum(partial, world.dtype), residual)
    assert torch.equal(new.flatten(0, 1)[:num_rows], expected)
    assert new.flatten(0, 1)[num_rows:].isnan().all()
    x = x if gather else x.flatten(0, 1)[:num_rows].unsqueeze(0)
    assert close(world, x[0], expected_x) and torch.equal(x, x[:1].expand_as(x))
    return x[0]


def check_push_linear(world: World, num_rows: int, inputs: int, **variant) -> torch.Tensor:
    """A product that sends its tiles, against the same product, written, and a round: all bits. Returns the residuals
    [V, T, D]. Both are calls of one channel, so that each finds the places as the other left them."""
    x = world.draw(world.ranks, num_rows, inputs).to(world.dtype)
    weight = (world.draw(world.ranks, world.width, inputs) * inputs**-0.5).to(world.dtype)
    weight[:, ::7] = 0  # sums of zero, whose sign must not look like a mark
    everyone = world.draw(num_rows, world.width).to(world.dtype).repeat(world.ranks, 1, 1)
    out, alone = ([torch.full_like(everyone, float("nan")) for _ in range(2)] for _ in range(2))
    push_linear.push_linear(x, weight, world.once)
    launch(push_linear.receive, world.device, tuple(out), everyone, world.weight, EPS, world.once, **variant)
    world.check()
    partial = torch.full_like(everyone, float("nan"))
    push_linear.push_linear(x, weight, world.once, out_TD=partial)
    launch(ch.one_shot, world.device, tuple(alone), partial, everyone, world.weight, EPS, world.once)
    world.check()
    for got, expected in zip(out, alone, strict=True):
        assert torch.equal(got, expected) and torch.equal(got, got[:1].expand_as(got))
    step = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[world.dtype]
    true = torch.matmul(x.double(), weight.double().transpose(1, 2))
    assert torch.allclose(partial.double(), true, rtol=step, atol=step)
    return out[1]


def random_ids(world: World, num_rows: int, routing: str) -> torch.Tensor:
    """[T, K] over all experts. "few": all rows to the same ones; "none": -1 all over; "some": some rows are padding."""
    total = world.experts * world.ranks // world.group
    if routing == "few":
        return torch.arange(world.top_k, device=world.device).repeat(num_rows, 1)
    order = torch.rand(num_rows, total, generator=world.generator, device=world.device).argsort(1)
    ids = order[:, : world.top_k].clone()
    if routing == "none":
        ids[:] = -1
    if routing == "some":
        ids[num_rows // 2 :] = -1
    return ids


def check_dispatch_and_combine(world: World, num_rows: int, routing: str = "any", parts: int = 1, shared: bool = True):
    """Every row comes where its experts are, and nothing else; their sums come back. Experts are imitated."""
    share = -(-num_rows // world.ranks)
    ids = random_ids(world, num_rows, routing)
    weights = torch.rand(num_rows, world.top_k, generator=world.generator, device=world.device)
    x = world.draw(num_rows, world.width).to(world.dtype)
    own_ids = torch.full((world.ranks * share, world.top_k), -1, dtype=torch.int32, device=world.device)
    own_ids[:num_rows] = ids
    own_ids = own_ids.unflatten(0, (world.ranks, share))
    args = (world.shares(x, share), own_ids, world.shares(weights, share), world.out, num_rows)
    places = {"experts": world.experts, "group": world.group}
    rows = world.ranks * share
    out = (
        x.new_full((world.ranks, rows, world.width), float("nan")),
        own_ids.new_full((world.ranks, rows, world.top_k), 77),
        weights.new_full((world.ranks, rows, world.top_k), float("nan")),
    )
    got_x, got_ids, got_weights = launch(ch.dispatch, world.device, out, *args, **places)
    world.check()
    for rank in range(world.ranks):
        first = rank // world.group * world.experts
        wanted = local_ids(ids, range(first, first + world.experts), torch.tensor(num_rows, device=world.device))
        here = (wanted >= 0).any(1)
        assert torch.equal(got_ids[rank][:num_rows].long(), wanted.long()) and (got_ids[rank][num_rows:] == -1).all()
        assert torch.equal(got_x[rank][:num_rows][here], x[here])
        assert torch.equal(got_weights[rank][:num_rows][here], weights[here])
    partial = world.partials(rows, parts)
    nothing = ~(got_ids >= 0).any(-1)
    partial.masked_fill_(nothing[:, None, :, None], float("nan"))  # what no expert wrote
    shared_x = world.draw(num_rows, world.width).to(world.dtype) if shared else None
    residual = world.draw(num_rows, world.width).to(world.dtype)
    residuals = world.shares(residual, share)
    out = x.new_full((world.ranks, num_rows, world.width), float("nan")), torch.full_like(residuals, float("nan"))
    shares = world.shares(shared_x, share) if shared else None
    args = (partial, got_ids, own_ids, shares, residuals, world.weight, EPS, world.back, num_rows)
    got, new = launch(ch.combine, world.device, out, *args, **places)
    world.check()
    total = expected_sum(partial.masked_fill(nothing[:, None, :, None], 0.0), world.dtype)[:num_rows]
    expected_x, expected = norm_of(world, total + shared_x.float() if shared else total, residual)
    assert torch.equal(new.flatten(0, 1)[:num_rows], expected)
    assert close(world, got[0], expected_x) and torch.equal(got, got[:1].expand_as(got))


def check_no_mark_is_missing(world: World) -> None:
    """After two more calls of one row everything but those rows' places must hold marks: nothing is left over."""
    for memory in world.memory[:1]:
        bits = memory.view(torch.int32 if world.dtype == torch.float32 else torch.int16)
        mark = torch.iinfo(bits.dtype).min
        rows = bits[:, : ch.SETS * world.ranks * world.capacity * world.width].unflatten(
            1, (ch.SETS, world.ranks, world.capacity, world.width)
        )
        assert (rows[:, :, :, 1:] == mark).all()
