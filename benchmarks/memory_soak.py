"""Keeps one rank's share of a model under a random load that seeks the largest steps, and watches its GPU's memory.

    python benchmarks/memory_soak.py --seconds 90                       # the full model's TP8 share, default settings
    python benchmarks/memory_soak.py --seconds 90 --draft --json soak.json
    python benchmarks/memory_soak.py --device cpu --model models/kimi_k25/tiny --tp-share 2 --max-model-len 600 \
        --max-num-batched-tokens 96 --seconds 10                        # a dry run

Prompts up to the longest, bursts of more requests than run at once, all logprobs, penalties, several answers, aborts,
growing sessions, and moments in which almost all blocks are taken away, so that requests lose their place. Exit code 1
if a step runs out of memory, takes more than was measured at start, or leaves the driver less than half of the margin;
or if a request or a block is lost.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine import log
from engine.bench.report import Report, model_name, publish
from engine.cache_plan import BLOCK_SIZE, GIB, EngineLimits
from engine.config import DEVICES, FULL_CONFIG, KV_CACHE_DTYPES, EngineConfig
from engine.core import EngineCore
from engine.launch import start_engine
from engine.request import CompletionDelta
from engine.sampling_params import MAX_LOGPROBS, SamplingParams

MOST_WAITING = 200
ARRIVALS_A_SECOND = 2.0
ABORTS_A_SECOND = 1.0
SQUEEZE_EVERY, SQUEEZE_SECONDS = 10.0, 2.0
FREE_BLOCKS = 0  # that a squeeze leaves
SESSION_TURNS = 12


@dataclass(frozen=True)
class Kind:
    """What arrives together: so many requests, tokens of each prompt and answer. share: prompts are that much of the
    longest instead. Of `options` each request draws one."""

    name: str
    weight: int
    count: tuple[int, int]
    prompt: tuple[int, int]
    answer: tuple[int, int]
    options: tuple[dict[str, Any], ...] = ({},)
    share: tuple[float, float] | None = None


_ALL_LOGPROBS = {"logprobs": MAX_LOGPROBS, "prompt_logprobs": MAX_LOGPROBS}
_PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}
_FILTERS = {"top_p": 0.9, "top_k": 50, "min_p": 0.01}
KINDS = (
    Kind("near the longest", 1, (1, 1), (0, 0), (1, 40), ({}, {"logprobs": 5}, _PENALTIES), (0.85, 0.99)),
    Kind("long", 2, (1, 2), (0, 0), (20, 200), ({}, _FILTERS, _ALL_LOGPROBS), (0.05, 0.3)),
    Kind("burst", 3, (64, 96), (1, 17), (10, 150), ({}, _FILTERS, {"logprobs": MAX_LOGPROBS}, _PENALTIES)),
    Kind("burst with all logprobs", 2, (64, 96), (1, 40), (10, 60), (_ALL_LOGPROBS | _FILTERS,)),
    Kind("scored prompts", 2, (1, 4), (500, 8000), (1, 20), (_ALL_LOGPROBS,)),
    Kind("many answers", 2, (1, 2), (100, 3000), (20, 200), ({"n": 4}, {"n": 16, "logprobs": 3})),
    Kind("penalties", 2, (4, 16), (10, 2000), (20, 200), (_PENALTIES, _PENALTIES | {"logprobs": 2})),
)


@dataclass
class Load:
    """The requests that a seed makes; counts what became of them."""

    core: EngineCore
    seed: int
    vocabulary: int
    counts: Counter = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._session: list[int] = []
        self._squeezed: list[int] = []

    def arrive(self) -> None:
        """One kind's requests, or the next turn of a session."""
        if not self.random.randrange(5):
            self._next_turn()
            return
        kind = self.random.choices(KINDS, [kind.weight for kind in KINDS])[0]
        for _ in range(self.random.randint(*kind.count)):
            self.add(kind.name, self._prompt(kind), self.random.randint(*kind.answer), self.random.choice(kind.options))

    def _prompt(self, kind: Kind) -> list[int]:
        longest = self.core.max_model_len
        if kind.share is not None:
            return self._tokens(max(int(longest * self.random.uniform(*kind.share)), 1))
        return self._tokens(min(self.random.randint(*kind.prompt), longest // 2))

    def _tokens(self, count: int) -> list[int]:
        return self.random.choices(range(self.vocabulary), k=count)

    def _next_turn(self) -> None:
        """Its prompt begins with that of the turn before, which is cached or not."""
        grown = self._session + self._tokens(max(self.core.max_model_len // SESSION_TURNS // 4, 1))
        self._session = grown if len(grown) < self.core.max_model_len // 4 else []
        self.add("session", grown[: self.core.max_model_len - 1], 30, {})

    def add(self, name: str, prompt: list[int], num_tokens: int, options: dict[str, Any]) -> None:
        seed = self.random.getrandbits(32)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed, **options)
        self.core.add_request(f"{name} {self.counts.total()}", prompt, params)
        self.counts[name] += 1

    def abort(self) -> None:
        unfinished = self.core.unfinished_ids()
        if unfinished:
            self.core.abort_request(self.random.choice(unfinished))
            self.counts["aborted"] += 1

    def squeeze(self) -> None:
        """Takes almost all free blocks away, as if other requests held them."""
        pool = self.core.replica.scheduler.kv_cache.pool
        if not self._squeezed and pool.num_free > FREE_BLOCKS:
            self._squeezed = pool.take(pool.num_free - FREE_BLOCKS)

    def release(self) -> None:
        if self._squeezed:
            self.core.replica.scheduler.kv_cache.pool.give_back(self._squeezed)
            self._squeezed = []

    def take(self, deltas: list[CompletionDelta]) -> None:
        for delta in deltas:
            self.counts["tokens"] += len(delta.token_ids)
            self.counts["answers"] += delta.finish_reason in ("length", "stop")


class Watch:
    """What the device holds; on a CPU nothing is known."""

    def __init__(self, device: torch.device):
        self.device = device if device.type == "cuda" else None
        self.free_bytes: int | None = None
        self.at_start = self._stats()
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)

    def look(self) -> None:
        if self.device is not None:
            free = torch.cuda.mem_get_info(self.device)[0]
            self.free_bytes = free if self.free_bytes is None else min(free, self.free_bytes)

    def _stats(self) -> dict[str, int]:
        if self.device is None:
            return {}
        torch.cuda.synchronize(self.device)
        stats = torch.cuda.memory_stats(self.device)
        names = {"allocated": "allocated_bytes.all.current", "ooms": "num_ooms", "retries": "num_alloc_retries"}
        peaks = {"peak allocated": "allocated_bytes.all.peak", "peak reserved": "reserved_bytes.all.peak"}
        return {name: stats.get(key, 0) for name, key in (names | peaks).items()}

    def result(self, limits: EngineLimits) -> dict[str, Any]:
        """In GiB, beside what was promised; empty on a CPU."""
        if self.device is None:
            return {}
        now, use = self._stats(), limits.memory
        step = now["peak allocated"] - self.at_start["allocated"]
        return {
            "least free": self.free_bytes / GIB,
            "kept free at least": use.margin / 2 / GIB,
            "largest step": step / GIB,
            "largest step promised": use.step / GIB,
            "peak reserved": now["peak reserved"] / GIB,
            "allocator gave back": now["retries"] - self.at_start["retries"],
            "out of memory": now["ooms"] - self.at_start["ooms"],
            "holds": self.free_bytes >= use.margin / 2 and step <= use.step and now["ooms"] == self.at_start["ooms"],
        }


def soak(core: EngineCore, load: Load, watch: Watch, seconds: float) -> None:
    """Until the time is over; then ends what is left. First of all a long prompt and a burst beside nothing else."""
    started = time.monotonic()
    load.add("near the longest", load._tokens(max(int(core.max_model_len * 0.97), 1)), 2, {"logprobs": 1})
    _step_until(core, load, watch, started + seconds / 3)
    next_arrival = next_abort = time.monotonic()
    next_squeeze = next_arrival + SQUEEZE_EVERY / 2
    while (now := time.monotonic()) < started + seconds:
        if now >= next_arrival and len(core.unfinished_ids()) < MOST_WAITING:
            load.arrive()
            next_arrival = now + load.random.expovariate(ARRIVALS_A_SECOND)
        if now >= next_abort:
            load.abort()
            next_abort = now + load.random.expovariate(ABORTS_A_SECOND)
        if now >= next_squeeze + SQUEEZE_SECONDS:
            load.release()
            next_squeeze = now + SQUEEZE_EVERY
        elif now >= next_squeeze:
            load.squeeze()
        _step(core, load, watch)
    load.release()
    for request_id in core.unfinished_ids():
        core.abort_request(request_id)
        load.counts["cut off"] += 1
    _step_until(core, load, watch, time.monotonic() + 60)


def _step_until(core: EngineCore, load: Load, watch: Watch, deadline: float) -> None:
    while core.has_unfinished() and time.monotonic() < deadline:
        _step(core, load, watch)


def _step(core: EngineCore, load: Load, watch: Watch) -> None:
    load.take(core.step())
    watch.look()


def settings_of(args: argparse.Namespace) -> EngineConfig:
    names = ("max_model_len", "max_num_batched_tokens", "kv_offload_gb", "kv_cache_dtype")
    given = {name: getattr(args, name) for name in names}
    return EngineConfig(
        model=args.model,
        tp_share=args.tp_share,
        load_format="dummy",
        device=args.device,
        draft="auto" if args.draft else None,
        seed=args.seed,
        hf_overrides={} if args.layers is None else {"num_hidden_layers": args.layers},
        **{name: value for name, value in given.items() if value is not None},
    )


def run(args: argparse.Namespace) -> Report:
    began = time.monotonic()
    core, ranks = start_engine(settings_of(args))
    runner = core.replica.runner
    limits, ready = runner.limits, time.monotonic() - began
    load = Load(core, args.seed, runner.model_config.vocab_size // runner.parallel.tp)
    watch = Watch(runner.parallel.device)
    failure = None
    try:
        soak(core, load, watch, args.seconds)
    except Exception as error:  # what a service would have ended with is this run's result
        failure = f"{type(error).__name__}: {error} (from {error.__cause__!r})"
    memory, cache = watch.result(limits), core.replica.scheduler.kv_cache
    left = {"blocks": cache.num_held, "requests": len(core.unfinished_ids())}
    stats = core.stats()
    row = {
        "steps": stats.num_steps,
        "requests": sum(load.counts[name] for name in {kind.name for kind in KINDS} | {"session"}),
        "answers": load.counts["answers"],
        "tokens": load.counts["tokens"],
        "prompt tokens": stats.num_prompt_tokens,
        "cached": cache.hit_tokens,
        "restored": cache.host.num_restored * BLOCK_SIZE,
        "preempted": stats.num_preemptions,
        "aborted": load.counts["aborted"],
        "GiB free": memory.get("least free"),
        "step GiB": memory.get("largest step"),
        "promised": memory.get("largest step promised"),
        "holds": failure is None and not any(left.values()) and memory.get("holds", True),
    }
    ranks.close()
    notes = [f"Limits: {limits.sentence()}.", f"Ready after {ready:.1f} s.", f"Failure: {failure or 'none'}."]
    data = {"memory_gib": memory, "left": left, "counts": dict(load.counts), "failure": failure, "ready_s": ready}
    data |= {"limits": limits.sentence(), "max_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    data |= {"settings": {name: value for name, value in vars(args).items() if name not in ("model", "json")}}
    title = f"{args.seconds:.0f} s of random load on one rank of TP{args.tp_share}: {model_name(args.model)}"
    return Report(title, [row], notes, data)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(FULL_CONFIG), help="directory of a config.json (default: Kimi-K2.5's)")
    parser.add_argument("--tp-share", type=int, default=8, metavar="N", help="size of the world (default 8)")
    parser.add_argument("--layers", type=int, help="number of layers (default: all)")
    parser.add_argument("--draft", action="store_true", help="with the bundled draft's shape")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--max-model-len", type=int, help="longest request (default: the model's)")
    parser.add_argument("--max-num-batched-tokens", type=int, help="tokens of a step (default: the engine's)")
    parser.add_argument("--kv-offload-gb", type=float, help="cold blocks on the host, GiB (default: none)")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the result")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    log.setup()
    report = run(args)
    given = sys.argv[1:] if argv is None else argv
    publish(report, ["python", "benchmarks/memory_soak.py", *given], args.json)
    return 0 if report.rows[0]["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
