"""The parts of `benchmarks.two_gpus` and their items."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import two_gpus_latency, two_gpus_steps, two_gpus_tokens
from benchmarks.parts import Item, Items, Part, Unable, program
from benchmarks.ranks import on_ranks
from engine.bench.report import model_name
from engine.comm.dispatcher import DISPATCHERS, dispatcher_class
from engine.comm.parallel_state import ParallelState
from engine.config import FULL_CONFIG, TINY_CHECKPOINT

TP = 2
SOAK_SIZES = [1, 4, 8, 16, 64]


@dataclass(frozen=True)
class Options:
    device: str
    dry_run: bool
    only: tuple[str, ...] = ()

    @property
    def dispatchers(self) -> list[str]:
        return [name for name in DISPATCHERS if not self.only or name in self.only]

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def _sizes(options: Options) -> dict[str, Any]:
    """Rows of the full model, or what two busy CPU cores do at once."""
    width, experts = (64, 16) if options.dry_run else (7168, 384)
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    return {"width": width, "num_experts": experts, "top_k": 8, "dtype": dtype}


def _obstacles(options: Options, ep: int, dtype: str | None = None) -> Item:
    """dtype: that of the rows, if it is not the device's own."""

    def ask(_: dict, seconds: float) -> dict[str, Any]:
        settings = _sizes(options) | ({} if dtype is None else {"dtype": dtype})
        if options.device == "cpu":  # asking keeps no GPU's memory from the ranks
            ranks = [two_gpus_latency.obstacles_of_rank(ParallelState(tp=TP, ep=ep), **settings)]
        else:
            work = "benchmarks.two_gpus_latency:obstacles_of_rank"
            ranks = on_ranks(work, settings, TP, ep, options.device, seconds)
        return {"reasons": {name: next(filter(None, (r[name] for r in ranks)), None) for name in ranks[0]}}

    return ask


def _reasons(done: dict[str, Any], ep: int) -> dict[str, str | None]:
    """Dispatcher -> what keeps it from running, or None."""
    reasons = done[f"obstacles ep{ep}"].get("reasons")
    if reasons is None:
        raise RuntimeError("the item that asks for obstacles failed.")
    return reasons


def _able(done: dict[str, Any], ep: int, name: str) -> None:
    reason = _reasons(done, ep)[name]
    if reason is not None:
        raise Unable(f"{name} {reason}")


def _doctor(options: Options) -> list[str]:
    size = ["--rows", "1,8"] if options.dry_run else []
    return ["--tp", str(TP), "--device", options.device, *size]


def _drills(options: Options) -> list[str]:
    return ["--device", options.device] + (["--quick"] if options.dry_run else [])


def _tokens(dtype: str, eps: tuple[int, ...]) -> Callable[[Options], Items]:
    """Every dispatcher, placement and mode; with the answer of one rank first and the comparison last."""

    def items(options: Options) -> Items:
        prompts = two_gpus_tokens.PROMPTS[: 3 if options.dry_run else None]
        num_tokens = 8 if options.dry_run else 48
        common = {"device": options.device, "dtype": dtype, "max_num_batched_tokens": 64, "model": str(TINY_CHECKPOINT)}
        if options.device == "cpu":
            common["num_threads"] = 1

        def answer(settings: dict[str, Any], seconds: float) -> dict[str, Any]:
            return {"answers": two_gpus_tokens.generate(common | settings, prompts, num_tokens, seconds)}

        def run(ep: int, name: str, mode: str) -> Item:
            def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
                _able(done, ep, name)
                placed = {"tp": TP, "ep": ep, "moe_comm": name, "enforce_eager": mode == "eager"}
                return answer(placed, seconds)

            return call

        def compare(done: dict[str, Any], seconds: float) -> dict[str, Any]:
            runs = {key: done[key] for key in keys if key in done}
            if len(runs) < len(keys) or any("error" in item for item in runs.values()):
                raise RuntimeError("not all answers are there; run the part again.")
            answers = {key: item["answers"] for key, item in runs.items() if "answers" in item}
            expected = done["one rank"]["answers"]
            if dtype == "float32":
                return two_gpus_tokens.compare_exactly(answers, expected)
            return two_gpus_tokens.compare_families(answers, expected, common, seconds)

        has_graphs = options.device == "cuda" and dtype == "bfloat16"
        modes = ("eager", "graphs") if has_graphs else ("eager",)
        runs = [(ep, name, mode) for ep in eps for name in options.dispatchers for mode in modes]
        keys = [f"ep{ep} {name} {mode}" for ep, name, mode in runs]
        for ep in eps:
            yield f"obstacles ep{ep}", _obstacles(options, ep, dtype)
        yield "one rank", lambda _, seconds: answer({}, seconds)
        yield from ((key, run(*one)) for key, one in zip(keys, runs, strict=True))
        yield "comparison", compare

    return items


def _latency(options: Options) -> Items:
    rows = [1, 8] if options.dry_run else [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    sizes = _sizes(options)

    def measure(work: str, settings: dict[str, Any], seconds: float) -> dict[str, Any]:
        if importlib.util.find_spec("engine.comm.timing") is None:
            raise RuntimeError("engine.comm.timing is not there yet.")
        ranks = on_ranks(f"benchmarks.two_gpus_latency:{work}", settings, TP, TP, options.device, seconds)
        return {"rows": ranks[0]}

    def dispatcher(name: str) -> Item:
        def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
            _able(done, TP, name)
            return measure("dispatcher_of_rank", {"dispatcher": name, "rows": rows} | sizes, seconds)

        return call

    plain = {"rows": rows, "width": sizes["width"], "dtype": sizes["dtype"]}
    yield f"obstacles ep{TP}", _obstacles(options, TP)
    yield "collectives", lambda _, seconds: measure("collectives_of_rank", plain, seconds)
    yield from ((name, dispatcher(name)) for name in options.dispatchers)


def _steps(ep: int) -> Callable[[Options], Items]:
    """Two loads of the weights: dispatchers that shard tokens hold the shared expert whole."""

    def items(options: Options) -> Items:
        cut = {"model": str(TINY_CHECKPOINT), "overrides": {}, "points": "1@64,4@100", "replays": 3}
        if not options.dry_run:
            points = "1@4096,4@4096,8@4096,16@4096,64@2048,128@1024"
            overrides = {"num_hidden_layers": 61, "n_routed_experts": 128}
            cut = {"model": str(FULL_CONFIG), "overrides": overrides, "points": points, "replays": 30}

        def measure(shards: bool) -> Item:
            def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
                reasons = _reasons(done, ep)
                kind = [n for n in options.dispatchers if dispatcher_class(n).shards_tokens == shards]
                able = [name for name in kind if reasons[name] is None]
                if not able:
                    raise Unable("; ".join(f"{name} {reasons[name]}" for name in kind) or "none was asked for")
                rows = two_gpus_steps.measure(TP, ep, options.device, seconds, cut | {"dispatchers": able})
                left_out = {name: reasons[name] for name in kind if name not in able}
                return {"cut": cut | {"model": model_name(cut["model"])}, "rows": rows, "left out": left_out}

            return call

        yield f"obstacles ep{ep}", _obstacles(options, ep)
        yield "replicated tokens", measure(False)
        yield "sharded tokens", measure(True)

    return items


def _soak(ep: int) -> Callable[[Options], Items]:
    def items(options: Options) -> Items:
        sizes = _sizes(options) | {"width": 64 if options.dry_run else 1024}
        work = {"replays": 60, "sizes": [1, 4, 8]} if options.dry_run else {"replays": 100_000, "sizes": SOAK_SIZES}

        def soak(name: str) -> Item:
            def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
                _able(done, ep, name)
                settings = sizes | work | {"dispatcher": name, "seconds": max(seconds - 30, 10)}
                ranks = on_ranks("benchmarks.two_gpus_soak:soak_of_rank", settings, TP, ep, options.device, seconds)
                return {"passed": all(rank["passed"] for rank in ranks), "ranks": ranks}

            return call

        yield f"obstacles ep{ep}", _obstacles(options, ep)
        yield from ((name, soak(name)) for name in options.dispatchers)

    return items


def _later(reason: str) -> Callable[[Options], Items]:
    def items(options: Options) -> Items:
        def call(_: dict, seconds: float) -> dict[str, Any]:
            raise Unable(reason)

        yield "all", call

    return items


PARTS = {
    "doctor": Part("links, latencies and the forecast of this machine", program("engine.doctor", _doctor)),
    "tokens_float32": Part("every dispatcher's greedy tokens are one rank's, exactly", _tokens("float32", (2, 1))),
    "tokens_bfloat16_ep2": Part("the same within a rounding family; near-ties counted", _tokens("bfloat16", (2,))),
    "tokens_bfloat16_ep1": Part("the same with sliced experts", _tokens("bfloat16", (1,))),
    "latency": Part("every dispatcher and plain collective by rows", _latency),
    "steps_ep2": Part("steps of a 61-layer, 128-expert cut with every dispatcher, whole experts", _steps(2)),
    "steps_ep1": Part("the same with sliced experts", _steps(1)),
    "soak_ep2": Part("100,000 replays of each dispatcher with random rows, routing and skew, whole experts", _soak(2)),
    "soak_ep1": Part("the same with sliced experts", _soak(1)),
    "drills": Part("ranks that die, hang or disagree", program("benchmarks.drills", _drills)),
    "eagle3": Part("speculative decoding", _later("needs a part with a draft, which is not written yet")),
    "http": Part("the server under load", _later("needs fastapi and uvicorn, and a load generator of the project")),
}
