"""Builds one rank's share with made-up weights for a measurement, and requests whose context is already there."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from engine.bench.roofline import ShareSizes
from engine.cache_plan import BLOCK_SIZE
from engine.comm.parallel_state import ParallelState
from engine.config import DEVICES, DTYPES, FULL_CONFIG, ConfigError, EngineConfig
from engine.kernels import kv_layout
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledRequest, SchedulerOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=str(FULL_CONFIG), help="directory of a config.json (default: Kimi-K2.5's)")
    parser.add_argument("--tp-share", type=int, default=8, metavar="N", help="size of the world (default 8)")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--replays", type=int, default=30, help="measured runs of each point (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, tokens, context and routing")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")


def share_config(args: argparse.Namespace, ep: int, **settings: Any) -> EngineConfig:
    """The engine's configuration for a share; raises ConfigError for settings that cannot work."""
    if args.replays < 1:
        raise ConfigError(f"--replays must be at least 1, not {args.replays}.")
    config = EngineConfig(
        model=args.model,
        tp_share=args.tp_share,
        ep_share=ep,
        device=args.device,
        dtype=args.dtype,
        load_format="dummy",
        seed=args.seed,
        enforce_eager=args.eager,
        **settings,
    )
    return config.resolve(torch.cuda.device_count())


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a result file keeps of the options: no place on this machine's disk."""
    return {name: value for name, value in vars(args).items() if name not in ("model", "json")}


def build_runner(
    config: EngineConfig,
    num_blocks: int,
    longest: int,
    max_num_seqs: int = 1,
    parallel: ParallelState | None = None,
    runner_class: type[ModelRunner] = ModelRunner,
) -> ModelRunner:
    """The share with a cache of at least `num_blocks` blocks beside block 0, filled with random numbers.

    With `parallel` it is a real rank, one of several that all build theirs."""
    files = ModelFiles.read(config)
    model = files.model_config
    if longest > model.max_position_embeddings:
        raise ConfigError(f"{longest} tokens are more than the model's {model.max_position_embeddings} positions.")
    dtype, layout = getattr(torch, config.dtype), kv_layout.LAYOUTS[config.kv_cache_dtype]
    row_bytes = layout.width(model.kv_lora_rank, model.qk_rope_head_dim) * layout.dtype(dtype).itemsize
    row_bytes *= model.num_hidden_layers
    row_bytes += 0 if files.draft is None else 2 * model.hidden_size * dtype.itemsize  # no draft's row is wider
    block_bytes = BLOCK_SIZE * row_bytes
    config = EngineConfig(
        **vars(config)
        | {
            "kv_cache_memory_gb": (num_blocks + 1.5) * block_bytes / 2**30,
            "max_model_len": longest,
            "max_num_seqs": max(max_num_seqs, -(-num_blocks * BLOCK_SIZE // longest)),
        }
    )
    runner = runner_class(config, files, parallel or _alone(config))
    fill_caches(runner)
    return runner


def fill_caches(runner: ModelRunner) -> None:
    """With random numbers, a layer at a time."""
    generator = torch.Generator(runner.parallel.device).manual_seed(runner.config.seed)
    width, latent = runner.model.cache_width, runner.model.latent_width
    for cache in runner.caches:
        rows = torch.empty(*cache.shape[:2], width, dtype=runner.model.dtype, device=cache.device)
        cache.copy_(kv_layout.of(cache).pack(rows.normal_(generator=generator), latent))


def _alone(config: EngineConfig) -> ParallelState:
    device = torch.device("cuda", 0) if config.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return ParallelState(device=device, **config.placement())


def sizes(runner: ModelRunner) -> ShareSizes:
    return ShareSizes(runner.model_config, runner.parallel.tp, runner.parallel.ep)


def blocks_of(context: int) -> int:
    return -(-context // BLOCK_SIZE)


def contexts_step(
    vocabulary: int, batch: int, context: int, num_tokens: int, blocks: list[int], seed: int = 0
) -> SchedulerOutput:
    """A step of `num_tokens` tokens for each of `batch` requests, which end at `context` tokens; the rest is cached.

    Token ids are random below `vocabulary`, distinct within the step where it has so many; blocks are handed out in
    order, block_ids of a request each its own.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = batch * num_tokens
    tokens = torch.randperm(vocabulary, generator=generator).repeat(-(-wanted // vocabulary))[:wanted].tolist()
    used = blocks_of(context)
    scheduled = []
    for index in range(batch):
        own = tokens[index * num_tokens : (index + 1) * num_tokens]
        request = Request(
            request_id=f"bench-{index}",
            prompt_token_ids=[0] * (context - num_tokens) + own,
            params=SamplingParams(temperature=0.0, ignore_eos=True),
            seed=seed + index,
            max_tokens=1,
            num_computed_tokens=context - num_tokens,
            block_ids=blocks[index * used : (index + 1) * used],
        )
        scheduled.append(ScheduledRequest.next_of(request, num_tokens))
    return SchedulerOutput(scheduled)


def shuffled_blocks(num_blocks: int, seed: int) -> list[int]:
    """The blocks 1..num_blocks in random order, since a running engine's are scattered too."""
    return (torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)) + 1).tolist()


def parse_points(text: str, option: str) -> list[tuple[int, int]]:
    """ "1@4096,64@2048" -> [(batch, context), ...]. Raises ConfigError."""
    try:
        points = [tuple(int(number) for number in part.split("@")) for part in text.split(",") if part]
        if all(len(point) == 2 and min(point) >= 1 for point in points):
            return points
    except ValueError:
        pass
    raise ConfigError(f"{option} must be batch@context pairs such as 1@4096,64@2048, not {text!r}.")


def parse_counts(text: str, option: str) -> list[int]:
    """ "1,4,8" -> [1, 4, 8]. Raises ConfigError."""
    counts = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise ConfigError(f"{option} must be whole numbers from 1 on such as 1,4,8, not {text!r}.")
    return counts
