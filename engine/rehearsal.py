"""Steps that a model runner makes before it serves: to compile all kernels at once, to see what memory they take."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from engine.cache_plan import BLOCK_SIZE
from engine.comm.collectives import agree_on_minimum
from engine.log import logger
from engine.request import Request, SamplingParams
from engine.scheduler import GuessPlan, ScheduledRequest, SchedulerOutput

GPU_MEMORY_SHARE = 0.90
_SOME_TOKENS = 128  # more than a decode step has, less than a long prompt
_TIMED = ((128, 0), (512, 0), (2048, 0), (512, 16384))  # tokens and context of the steps that are timed at start
_TIMED_STEPS = 4  # of each


def compile_kernels(runner: Any) -> None:
    """All kernels of all steps at once, since each would else be compiled where it is first launched.

    Ranks on one host share Triton's cache, so that one of them compiles."""
    device = runner.parallel.device
    if device.type != "cuda" or runner.model.kernels.name != "triton":
        return
    from engine.kernels.gpu import warm_up

    started = time.monotonic()
    with warm_up.recorded_launches() as launches:
        _dry_run(runner)
    torch.cuda.empty_cache()
    count, failures = warm_up.compile_all(launches) if not device.index else (0, [])
    agree_on_minimum(0, runner.parallel)
    if failures:
        logger.warning("%s; such kernels are compiled where they are first used", failures[0])
    logger.info("%d kernels in %.1f s, %d of them compiled", len(launches), time.monotonic() - started, count)


def _most_tokens(runner: Any) -> int:
    return min(runner.config.max_num_batched_tokens, runner.model_config.max_position_embeddings)


@torch.inference_mode()
def _dry_run(runner: Any) -> None:
    """A step of every kind that differs in its kernels; within `recorded_launches`, so nothing of it counts."""
    most = _most_tokens(runner)
    for num_tokens, context in ((most, 0), (min(most, _SOME_TOKENS), 0), (min(most, 2 * BLOCK_SIZE), BLOCK_SIZE)):
        run_alone(runner, num_tokens, min(context, num_tokens - 1))
    if runner.capture_obstacle() is None:
        runner.hold_caches(2)
        runner.max_model_len = BLOCK_SIZE
        variants = runner.decode_variants()
        inputs = runner.decode_inputs(sorted({variant.num_requests for variant in variants}))
        step = runner.decode_step(max(variant.num_rows for variant in variants))
        for variant in variants:
            step.whole(inputs[variant.num_requests], variant)
        runner.drop_caches()


def free_gpu_bytes(runner: Any) -> int:
    """What weights and the largest step leave of this GPU's share, measured by running that step once."""
    device = runner.parallel.device
    torch.cuda.reset_peak_memory_stats(device)
    run_alone(runner, _most_tokens(runner))
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return int(free + idle - (1 - GPU_MEMORY_SHARE) * total)


def prefill_times(runner: Any, sizes: Sequence[tuple[int, int]] = _TIMED) -> list[tuple[int, int, float]]:
    """(tokens, context, seconds) of a prompt's chunks of about these sizes, each in a row of its like. Needs the cache;
    what it holds is overwritten."""
    room = min(runner.max_model_len, (runner.num_blocks - 1) * BLOCK_SIZE)
    times = []
    for num_tokens, context in sizes:
        num_tokens = min(num_tokens, _most_tokens(runner), room)
        context = min(context, room - num_tokens)
        if (num_tokens, context) not in [known[:2] for known in times]:
            times.append((num_tokens, context, _steady_seconds(runner, _chunk(runner, num_tokens, context))))
    return times


def _chunk(runner: Any, num_tokens: int, context: int) -> SchedulerOutput:
    """Of tokens drawn by chance: equal ones would all be routed to the same few experts."""
    drawn, vocabulary = random.Random(num_tokens), runner.model_config.vocab_size // runner.parallel.tp
    prompt = [drawn.randrange(vocabulary) for _ in range(context + num_tokens)]
    blocks = list(range(1, -(-len(prompt) // BLOCK_SIZE) + 1))
    request = Request("chunk", prompt, SamplingParams(), 0, 1, num_computed_tokens=context, block_ids=blocks)
    return SchedulerOutput([ScheduledRequest.next_of(request, num_tokens)], plan=GuessPlan(0, runner.num_guesses))


def _steady_seconds(runner: Any, output: SchedulerOutput) -> float:
    """Between reads, each step launched before the one ahead of it is read."""
    in_flight, reads = runner.execute(output), []
    for _ in range(_TIMED_STEPS):
        launched = runner.execute(output)
        in_flight.read()
        reads.append(time.monotonic())
        in_flight = launched
    in_flight.read()
    return min(b - a for a, b in itertools.pairwise(reads))


def run_alone(runner: Any, num_tokens: int, context: int = 0) -> None:
    """The step of one request that ends at `num_tokens`, the first `context` of them cached, in a cache made for it."""
    blocks = list(range(1, -(-num_tokens // BLOCK_SIZE) + 1))
    request = Request("alone", [0] * num_tokens, SamplingParams(), 0, 1, num_computed_tokens=context, block_ids=blocks)
    runner.hold_caches(len(blocks) + 1)
    item = ScheduledRequest.next_of(request, num_tokens - context)
    runner.execute(SchedulerOutput([item], plan=GuessPlan(0, runner.num_guesses)))
    runner.drop_caches()
