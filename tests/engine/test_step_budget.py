"""While a long prompt is prefilled, steps keep within the bound, at nearly the rate of who knows all costs."""

from __future__ import annotations

import pytest

from engine.request import Request, SamplingParams
from engine.scheduler import NO_GUESSES, GuessPlan, ScheduledRequest, SchedulerOutput
from engine.step_budget import FIRST_TOKENS, StepBudget, StepTimer
from tests.step_budget_sim import (
    Machine,
    World,
    attending,
    beside,
    best_rate,
    linear,
    percentile,
    rate,
    sparse,
    tiled,
)

LONG = 100_000
SHAPES = [linear, sparse, attending, tiled]


def p99(steps) -> float:
    return percentile([step.seconds for step in beside(steps)], 0.99)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("machine", [{}, {"noise": 0.04}, {"noise": 0.03, "hiccups": 0.002, "seed": 1}], ids=str)
@pytest.mark.parametrize("cost", SHAPES, ids=lambda c: c.__name__)
def test_a_long_prompt_beside_streams(cost, machine, overlap):
    """The rate is set against that of chunks sized by one who knows every cost, hiccups left out."""
    world = World(Machine(cost, **machine), overlap=overlap)
    world.stream(4)
    steps = world.prefill(LONG)
    assert sum(step.load.tokens for step in steps) >= LONG - 1
    assert p99([step for step in steps if not step.is_hiccup]) <= 1.2 * world.budget.seconds
    assert all(step.load.tokens >= 1 for step in beside(steps))
    best = best_rate(cost, world.budget.seconds, 4, 4 * 4000, LONG, 2048)
    assert rate([step for step in beside(steps) if not step.is_hiccup]) >= 0.92 * best


@pytest.mark.parametrize("bound", [0.025, 0.1])
def test_other_bounds(bound):
    world = World(Machine(attending, noise=0.03), bound)
    world.stream(4)
    steps = world.prefill(LONG)
    assert p99(steps) <= 1.2 * bound
    assert rate(beside(steps)) >= 0.9 * best_rate(attending, bound, 4, 4 * 4000, LONG, 2048)


@pytest.mark.parametrize("cost", SHAPES, ids=lambda c: c.__name__)
def test_the_very_first_chunks_grow_from_few_tokens(cost):
    """Streams whose prompts were one token each: nothing is known of prefill when the long one comes."""
    world = World(Machine(cost), max_num_batched_tokens=8192)
    world.stream(4, context=1)
    steps = beside(world.prefill(LONG))
    assert steps[0].load.tokens == FIRST_TOKENS
    assert max(step.seconds for step in steps) <= 1.2 * world.budget.seconds
    assert max(step.load.tokens for step in steps[:20]) >= 500, "but they grow fast"


def test_steps_measured_at_start_spare_the_small_ones():
    seeds = [(n, 0, attending_alone(n)) for n in (128, 512, 2048)]
    world = World(Machine(attending), seeds=seeds)
    world.stream(4, context=1)
    steps = beside(world.prefill(LONG))
    assert steps[0].load.tokens >= 1000
    assert max(step.seconds for step in steps) <= 1.2 * world.budget.seconds


def attending_alone(tokens: int) -> float:
    from engine.prefill_costs import StepLoad

    return attending(StepLoad(tokens, 0, tokens * tokens / 2, 0))


def test_a_prompt_that_starts_far_into_its_context():
    """Its first tokens were computed before; no step with such a context has been seen."""
    world = World(Machine(attending))
    world.stream(4)
    world.prefill(3000)
    first = len(world.steps)
    request = world.add("resumed", 95_000, 2)
    world.step()
    request.num_computed_tokens = 90_000 if request.num_computed_tokens == 0 else request.num_computed_tokens
    while not request.output_token_ids:
        world.step()
    steps = beside(world.steps[first:])
    assert percentile([step.seconds for step in steps], 0.95) <= 1.2 * world.budget.seconds


def test_many_prompts_at_once():
    world = World(Machine(attending, noise=0.02))
    world.stream(8)
    steps = world.prefill(40_000, 500, 3000, 20_000, 1, 2, 64)
    assert p99(steps) <= 1.2 * world.budget.seconds
    assert sum(step.load.tokens for step in steps) >= 63_000


def test_slow_hours_end():
    """Twice the cost for a while: within few steps chunks fit again, and then they are as long as before."""
    machine = Machine(sparse, noise=0.02)
    world = World(machine)
    world.stream(4)
    before = rate(beside(world.prefill(20_000)))
    start = machine.number
    machine.slow = lambda number: 2.0 if number < start + 60 else 1.0
    slow, after = beside(world.prefill(60_000))[:55], beside(world.prefill(60_000))[30:]
    assert sum(step.seconds > 1.2 * world.budget.seconds for step in slow) <= 6
    assert rate(after) >= 0.95 * before


def test_a_bound_that_no_step_can_meet_lets_prompts_go_on():
    """Decodes alone take longer: then a step may take a little more than the least one."""
    world = World(Machine(sparse), bound=0.005)
    world.stream(16, context=1)
    steps = beside(world.prefill(1000))
    least = sparse(steps[0].load._replace(tokens=1))
    assert p99(steps[6:]) <= 1.25 * least
    assert sum(step.load.tokens for step in steps) / len(steps) > 3


def test_a_first_step_that_was_too_long_is_not_taken_for_the_least():
    """Sixteen tokens take four times the bound, and one takes a quarter of that."""
    world = World(Machine(lambda load: 0.01 * (load.tokens + load.rows)), bound=0.05)
    world.stream(1, context=1)
    steps = beside(world.prefill(500))
    assert steps[0].seconds > 0.1 and p99(steps[4:]) <= 1.2 * world.budget.seconds


def test_no_bound_where_nobody_decodes_or_nothing_prefills():
    budget = StepBudget(0.05, 2048)
    request = Request("a", [1] * 500, SamplingParams(), 0, 100)
    assert budget.limit([request], [], NO_GUESSES) is None, "alone, a prompt may fill the step"
    request.num_computed_tokens, request.output_token_ids = 500, [7]
    assert budget.limit([request], [], NO_GUESSES) is None, "nothing to prefill"
    assert budget.limit([request], [Request("b", [1] * 50, SamplingParams(), 0, 9)], NO_GUESSES) == FIRST_TOKENS
    assert budget.snapshot().limit_tokens == FIRST_TOKENS
    assert budget.limit([], [], NO_GUESSES) is None and budget.snapshot().limit_tokens is None


def test_guesses_count_as_rows():
    """Rows that verify guesses are paid for out of the bound as well."""
    seeds = [(n, 0, 30e-6 * n) for n in (16, 64, 256, 1024, 2048)]
    found = []
    for guesses in (0, 7):
        budget = StepBudget(0.02, 2048, seeds)
        decoding = [Request(f"d{i}", [1] * 10, SamplingParams(), 0, 9, num_computed_tokens=9) for i in range(16)]
        found.append(budget.limit(decoding, [Request("b", [1] * 5000, SamplingParams(), 0, 9)], GuessPlan(guesses, 0)))
    assert found[0] - found[1] == pytest.approx(16 * 7, abs=12)


def output_of(*num_tokens: int, samples: bool = True) -> SchedulerOutput:
    items = [
        ScheduledRequest(Request(str(i), [1] * 99, SamplingParams(), 0, 9), 0, count, samples)
        for i, count in enumerate(num_tokens)
    ]
    return SchedulerOutput(items)


def test_only_the_time_between_steps_that_were_waited_for_counts():
    now = [0.0]
    timer = StepTimer(lambda: now[0])

    def step(seconds: float, output: SchedulerOutput, outside: float = 0.0) -> float | None:
        now[0] += outside
        timer.enter()
        now[0] += seconds
        return timer.leave(output)

    assert step(0.1, output_of(1)) is None, "the first"
    assert step(0.2, output_of(1, 50)) == pytest.approx(0.2)
    assert step(0.1, SchedulerOutput()) is None, "the next is in flight"
    assert step(0.1, output_of(1)) == pytest.approx(0.2)
    assert step(0.1, output_of(50, samples=False)) is None, "nobody waited for it"
    assert step(0.1, output_of(1)) is None, "which includes the one before"
    assert step(0.1, output_of(1), outside=0.01) == pytest.approx(0.11)
    assert step(0.1, output_of(1), outside=1.0) is None, "the caller did other things"
    assert step(0.1, output_of(1)) == pytest.approx(0.1)
    timer.pause()
    assert step(0.1, output_of(1), outside=5.0) is None
