"""The parts of `benchmarks.full_size`. Each has one engine at most, which its items share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import full_size_http, two_gpus_latency
from benchmarks.full_size_shape import (
    LENGTHS,
    REPLICATED,
    SHARDED,
    Options,
    engine_settings,
    memory_of_rank,
    shape_of,
)
from benchmarks.parts import Item, Items, Part, Unable, program
from benchmarks.rank_steps import slowest
from benchmarks.rank_team import RankTeam
from benchmarks.ranks import on_ranks
from engine.bench.forced import acceptance_for, expected_length
from engine.bench.report import model_name
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.model_files import read_model_config

_MAKER = "benchmarks.full_size_rank:FullSizeRank"
_SHARE = 0.6  # of the seconds left: one item that hangs leaves some to the next, also when the part is run again
_LEAD = 512  # tokens of a request around those that are timed (engine/bench/spec_share.py)


def parts_of(tp: int) -> dict[str, Part]:
    """By name, in the order in which to run them. seconds: guessed from 80 s for a cut on two GPUs."""
    found = {"doctor": Part("links, latencies and the forecast of this machine", program("engine.doctor", _doctor), 90)}
    for ep in dict.fromkeys((tp, 2, 1)):
        way = "whole experts" if ep == tp else "slices" if ep == 1 else "two groups of slices"
        for kind, names, seconds in (("replicated", REPLICATED, 240), ("sharded", SHARDED, 180)):
            what = f"ep {ep} ({way}): steps through {', '.join(names)}" + "; prefill" * (names is REPLICATED)
            found[f"ep{ep}_{kind}"] = Part(what, _steps(ep, names), seconds)
    found["eagle3"] = Part("a full-size draft at forced accept lengths", _eagle3, 240)
    found["http"] = Part("serve.py over all ranks, and clients that stream", _http, 180)
    return found


def _doctor(options: Options) -> list[str]:
    size = ["--rows", "1,8", "--dispatchers", "allreduce,nccl_a2a"] if options.dry_run else []
    return ["--tp", str(options.tp), "--ep", str(options.tp), "--device", options.device, *size]


def _fits(done: dict[str, Any]) -> None:
    """What does not fit is not begun."""
    memory = done["memory"]
    if "skipped" in memory:
        raise Unable(memory["skipped"])
    if "error" in memory:
        raise RuntimeError("the item that weighs the model failed.")


def _memory(options: Options, settings: dict[str, Any], requests: int, longest: int) -> Item:
    return lambda done, seconds: memory_of_rank(options, settings, requests, longest)


def _about(options: Options) -> dict[str, Any]:
    shape = shape_of(options)
    return {"model": model_name(shape.model), "overrides": shape.overrides, "dtype": options.dtype}


def _steps(ep: int, names: tuple[str, ...]) -> Callable[[Options], Items]:
    """One engine: all `names` shard tokens, or none does, and so they use the same weights."""

    def items(options: Options) -> Items:
        shape = shape_of(options)
        settings = engine_settings(options, ep, names[0])  # it runs everywhere
        most, prefill = max(shape.rows), shape.prefill if names is REPLICATED else 0
        longest = max(shape.context, prefill)
        engine = {"settings": settings, "most": most, "context": shape.context, "longest": longest, "chunk": prefill}

        def steps(name: str) -> Item:
            def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
                _fits(done)
                _able(done, name)
                asked = {"dispatcher": name, "rows": shape.rows, "context": shape.context, "replays": shape.replays}
                ranks = team.call("steps", asked, _SHARE * seconds)
                return _about(options) | {"rows": [slowest(rows) for rows in zip(*ranks, strict=True)]}

            return call

        def fresh_prompt(done: dict[str, Any], seconds: float) -> dict[str, Any]:
            _fits(done)
            asked = {"num_tokens": prefill, "replays": shape.replays}
            return _about(options) | {"rows": [slowest(tuple(team.call("prefill", asked, _SHARE * seconds)))]}

        with RankTeam(_MAKER, engine, options.tp, ep, options.device) as team:
            yield "memory", _memory(options, settings, most, shape.context)
            yield "obstacles", _obstacles(options, ep, names)
            yield from ((name, steps(name)) for name in names)
            if prefill:
                yield "prefill", fresh_prompt

    return items


def _obstacles(options: Options, ep: int, names: tuple[str, ...]) -> Item:
    def ask(done: dict[str, Any], seconds: float) -> dict[str, Any]:
        _fits(done)
        _, _, model = read_model_config(EngineConfig(**engine_settings(options, ep, "auto")))
        asked = {"width": model.hidden_size, "num_experts": model.n_routed_experts, "dtype": options.dtype}
        asked["top_k"] = model.num_experts_per_tok
        if options.device == "cpu":
            ranks = [two_gpus_latency.obstacles_of_rank(ParallelState(tp=options.tp, ep=ep), **asked)]
        else:  # in processes of their own, which keep no GPU's memory
            work = "benchmarks.two_gpus_latency:obstacles_of_rank"
            ranks = on_ranks(work, asked, options.tp, ep, options.device, seconds)
        wanted = [name for name in names if name != "auto"]
        return {"reasons": {name: next(filter(None, (rank[name] for rank in ranks)), None) for name in wanted}}

    return ask


def _able(done: dict[str, Any], name: str) -> None:
    reasons = done["obstacles"].get("reasons")
    if reasons is None:
        raise RuntimeError("the item that asks for obstacles failed.")
    if reasons.get(name) is not None:
        raise Unable(f"{name} {reasons[name]}")


def _eagle3(options: Options) -> Items:
    shape = shape_of(options)
    settings = engine_settings(options, options.tp, "auto", with_draft=True)
    most, longest = max(shape.batches), shape.context + shape.spec_tokens + _LEAD
    chunk = min(shape.prefill, longest)
    engine = {"settings": settings, "most": most, "context": longest, "longest": longest, "chunk": chunk}

    def costs(batch: int) -> Item:
        def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
            _fits(done)
            asked = {"batch": batch, "context": shape.context, "replays": shape.replays}
            rows = [slowest(one) for one in zip(*team.call("costs", asked, _SHARE * seconds), strict=True)]
            return _about(options) | {"rows": rows, "gains": gains(rows)}

        return call

    def decoding(batch: int, length: float | None) -> Item:
        def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
            _fits(done)
            asked = {"batch": batch, "context": shape.context, "num_tokens": shape.spec_tokens}
            ranks = team.call("decoding", asked | {"accept_length": length}, _SHARE * seconds)
            row = min(ranks, key=lambda one: one["tok/s"])
            plain = done.get(f"no draft, {batch}", {}).get("row")
            if length is not None and plain is not None:
                row |= {"speedup": row["tok/s"] / plain["tok/s"]}
            return {"row": row}

        return call

    with RankTeam(_MAKER, engine, options.tp, options.tp, options.device) as team:
        yield "memory", _memory(options, settings, most, longest)
        for batch in shape.batches:
            yield f"costs, {batch}", costs(batch)
            yield f"no draft, {batch}", decoding(batch, None)
            for length in LENGTHS:
                yield f"accept length {length}, {batch}", decoding(batch, length)


def gains(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Accept length -> the number of guesses that pays most, and what it gains, by the costs of steps alone. Accept
    lengths are those of the most guesses; fewer keep less of them."""
    timed = {row["guesses"]: row["ms"] for row in rows}
    plain, most = timed.pop("no draft"), max(timed)
    found = {}
    for length in LENGTHS if most else ():
        chance = acceptance_for(length, most)
        by_count = {count: expected_length(chance, count) * plain / ms for count, ms in timed.items()}
        best = max(by_count, key=by_count.get)
        found[str(length)] = {"guesses": best, "speedup": by_count[best]}
    return found


def _http(options: Options) -> Items:
    shape = shape_of(options)
    settings = engine_settings(options, options.tp, "auto")
    longest = shape.prompt_tokens + shape.output_tokens + 64

    def serve(done: dict[str, Any], seconds: float) -> dict[str, Any]:
        _fits(done)
        return _about(options) | full_size_http.run(options, seconds)

    yield "memory", _memory(options, settings, max(shape.clients), longest)
    yield "clients", serve
