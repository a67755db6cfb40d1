"""Steps that a model runner makes before it serves: to compile all kernels at once, to see what memory they take."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from engine.cache_plan import BLOCK_SIZE
from engine.chunk_step import SIZES, ChunkStep, run_pieces
from engine.comm.collectives import agree_on_minimum
from engine.log import logger
from engine.request import Request
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.scheduler import GuessPlan, ScheduledRequest, SchedulerOutput

_SOME_TOKENS = (128, 512, 1024)  # with the most that a step has, one for each shape of the experts' kernels
_TIMED = (
    (128, 0),
    (512, 0),
    (2048, 0),
    (512, 16384),
    (256, 65536),
    (64, 65536),
)  # tokens, context; timed at start
_TIMED_STEPS = 4  # of each
_SHORT_TOKENS = 16  # of a request that attention takes in the absorbed form
_FAR_TOKENS = 32768  # attention takes a context in pieces smaller than this, so more of it takes no more memory
_SCORED = SamplingParams(top_p=0.9, top_k=100, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
_SHAPED = replace(_SCORED, repetition_penalty=1.1, presence_penalty=0.1, logit_bias={0: 1.0})


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


def most_positions(runner: Any) -> int:
    return runner.model_config.max_position_embeddings


def _most_tokens(runner: Any) -> int:
    """Of one request in a step."""
    return min(runner.config.max_num_batched_tokens, most_positions(runner))


@torch.inference_mode()
def _dry_run(runner: Any) -> None:
    """A step of every kind that differs in its kernels; within `recorded_launches`, so nothing of it counts."""
    most = _most_tokens(runner)
    some = [(min(most, num_tokens), 0) for num_tokens in _SOME_TOKENS]
    for num_tokens, context in ((most, 0), *some, (min(most, 2 * BLOCK_SIZE), BLOCK_SIZE)):
        run_alone(runner, num_tokens, min(context, num_tokens - 1))
    runner.hold_caches(2)
    for _, output in largest_steps(runner, most_context=4 * BLOCK_SIZE):
        runner.execute(output)
    runner.drop_caches()
    if runner.capture_obstacle() is None:
        runner.hold_caches(2)
        runner.max_model_len = BLOCK_SIZE
        variants = runner.decode_variants()
        inputs = runner.decode_inputs(sorted({variant.num_requests for variant in variants}))
        step = runner.decode_step(max(variant.num_rows for variant in variants))
        for variant in variants:
            step.whole(inputs[variant.num_requests], variant)
        sizes = [size for size in SIZES if size <= runner.config.max_num_batched_tokens]
        chunk = ChunkStep.of(runner, sizes)
        for size in sizes:
            run_pieces(chunk, size)
        runner.drop_caches()


class Part(NamedTuple):
    """One request of a rehearsed step: `num_tokens` of its tokens, and guesses after them, behind `context` others."""

    num_tokens: int
    context: int = 0
    num_guesses: int = 0


def largest_steps(runner: Any, most_context: int | None = None) -> Iterator[tuple[str, SchedulerOutput]]:
    """A step of each kind that may take the most memory, with its name, for a cache of at least 2 blocks: of the most
    tokens, with all logprobs and filters. All blocks of all requests are block 1: what comes out means nothing.
    most_context: tokens before a chunk, if not as many as may be; the kernels are the same.

    Memory differs by kind: a fresh prompt has the widest layers, one behind a long context expands that in pieces, many
    short ones have partial sums of attention and the most logits, decodes the draft's rows. One kind's peak may lie in
    attention and another's at the logits, so the largest of all counts."""
    most, seqs, guesses = _most_tokens(runner), runner.max_num_seqs, runner.num_guesses
    longest = min(runner.config.max_model_len or most_positions(runner), most_positions(runner))
    room = max(longest - 1 - 2 * guesses, 1)
    chunk = min(most, room)
    room = room if most_context is None else min(room, chunk + most_context)
    far = max(min(_FAR_TOKENS, room) - chunk, 0)
    yield "a fresh prompt", _step(runner, [Part(chunk)])
    yield "the end of the longest prompt", _step(runner, [Part(chunk, room - chunk)])
    decodes = min(seqs, max(most // (1 + guesses), 1))
    fitting = min(guesses, most - 1)
    context = max(min(_FAR_TOKENS, room) - 1, 0)
    yield f"{decodes} decodes", _step(runner, [Part(1, context, fitting)] * decodes)
    short = min(_SHORT_TOKENS, max(most // seqs, 1), room)
    burst = [Part(1, context, min(guesses, short - 1)), *[Part(short, far)] * (seqs - 2)][: seqs - 1]
    left = most - sum(part.num_tokens + part.num_guesses for part in burst)
    yield f"{seqs} requests at once", _step(runner, [*burst, Part(min(left, chunk), far)])


def _step(runner: Any, parts: list[Part]) -> SchedulerOutput:
    """The last request shapes its logits; one at a time does, so that more of them take no more."""
    items = []
    for index, part in enumerate(parts):
        length = part.context + part.num_tokens
        blocks = [1] * -(-(length + 2 * runner.num_guesses) // BLOCK_SIZE)
        params = _SHAPED if index == len(parts) - 1 else _SCORED
        request = Request(
            f"rehearsed-{index}",
            [0] * length,
            params,
            seed=index,
            max_tokens=1 + runner.num_guesses,
            num_computed_tokens=part.context,
            block_ids=blocks,
            guess_ids=[0] * part.num_guesses,
        )
        items.append(ScheduledRequest.next_of(request, part.num_tokens, part.num_guesses))
    return SchedulerOutput(items, plan=GuessPlan(runner.num_guesses, runner.num_guesses))


def prefill_times(runner: Any, sizes: Sequence[tuple[int, int]] = _TIMED) -> list[tuple[int, int, float]]:
    """(tokens, context, seconds) of a prompt's chunks of about these sizes, each in a row of its like. Needs the cache;
    what it holds is overwritten."""
    room = min(runner.max_model_len, (runner.num_blocks - 1) * BLOCK_SIZE - 2 * runner.num_guesses)
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
    prompt = [0] * context + [drawn.randrange(vocabulary) for _ in range(num_tokens)]
    blocks = list(range(1, -(-(len(prompt) + 2 * runner.num_guesses) // BLOCK_SIZE) + 1))
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
