"""The parts of `benchmarks.two_gpus` and their items."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import eagle3_forced, rank_calls, two_gpus_latency, two_gpus_steps, two_gpus_tokens
from benchmarks.parts import Item, Items, Part, Unable, program
from benchmarks.rank_team import RankTeam
from benchmarks.ranks import on_ranks
from benchmarks.silent_steps import SILENT, hidden
from engine.bench.report import model_name
from engine.comm.dispatcher import DISPATCHERS, dispatcher_class
from engine.comm.parallel_state import ParallelState
from engine.config import FULL_CONFIG, TINY_CHECKPOINT

TP = 2
SOAK_SIZES = [1, 4, 8, 16, 64]
CUT = {"num_hidden_layers": 61, "n_routed_experts": 128}  # of the full model: 109 GB a rank of two
ORACLE = "reference"  # for tests: no engine would choose it, so no step is timed with it
ITEM_SECONDS = 120.0  # of one dispatcher's tokens or replays: a hang leaves time to the others
STEPS_SECONDS = 180.0  # of one dispatcher, an engine's start included
BACKENDS = {"deepep": ("sgl-deep-ep", "deep-ep"), "nccl_ep": ("nccl-extensions",)}  # dispatcher -> packages


@dataclass(frozen=True)
class Options:
    device: str
    dry_run: bool
    only: tuple[str, ...] = ()

    @property
    def dispatchers(self) -> list[str]:
        return [name for name in DISPATCHERS if self.wants(name)]

    def wants(self, name: str) -> bool:
        return not self.only or name in self.only

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def _sizes(options: Options) -> dict[str, Any]:
    """Rows of the full model, or what two busy CPU cores do at once."""
    width, experts = (64, 16) if options.dry_run else (7168, 384)
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    return {"width": width, "num_experts": experts, "top_k": 8, "dtype": dtype}


def _obstacles(options: Options, ep: int, dtype: str | None = None, team: RankTeam | None = None) -> Item:
    """dtype: that of the rows, if it is not the device's own. team: ranks that are asked, else some that end again."""

    def ask(_: dict, seconds: float) -> dict[str, Any]:
        settings = _sizes(options) | ({} if dtype is None else {"dtype": dtype})
        if options.device == "cpu":  # asking keeps no GPU's memory from the ranks
            ranks = [two_gpus_latency.obstacles_of_rank(ParallelState(tp=TP, ep=ep), **settings)]
        else:
            work = "benchmarks.two_gpus_latency:obstacles_of_rank"
            if team is None:
                ranks = on_ranks(work, settings, TP, ep, options.device, seconds)
            else:
                ranks = rank_calls.call(team, work, settings, seconds)
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


def _comm(options: Options) -> list[str]:
    size = ["--model", str(TINY_CHECKPOINT), "--rows", "1,8"] if options.dry_run else []
    return ["comm", "--tp", str(TP), "--device", options.device, "--seconds", "120", *size]


def _tokens(dtype: str, eps: tuple[int, ...]) -> Callable[[Options], Items]:
    """Every dispatcher and placement, an item each with all its modes; one rank's answer first, comparison last."""

    def items(options: Options) -> Items:
        prompts = two_gpus_tokens.PROMPTS[: 3 if options.dry_run else None]
        num_tokens = 12 if options.dry_run else 48
        common = {"device": options.device, "dtype": dtype, "max_num_batched_tokens": 64, "model": str(TINY_CHECKPOINT)}
        common |= {"max_num_seqs": 8, "kv_cache_memory_gb": 0.25}
        if options.device == "cpu":
            common["num_threads"] = 1
        has_graphs = options.device == "cuda" and dtype == "bfloat16"
        steps = ("eager", "graphs") if has_graphs else ("eager",)
        modes = [f"{step}{draft}" for step in steps for draft in ("", " eagle3")]

        def one_rank(_: dict, seconds: float) -> dict[str, Any]:
            return {"answers": two_gpus_tokens.generate(common, prompts, num_tokens, seconds)}

        def run(team: RankTeam, ep: int, name: str) -> Item:
            def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
                _able(done, ep, name)
                settings = {"settings": common | {"moe_comm": name}, "modes": modes, "prompts": prompts}
                settings["num_tokens"] = num_tokens
                work = "benchmarks.two_gpus_tokens:tokens_of_rank"
                ranks = rank_calls.call(team, work, settings, min(seconds, ITEM_SECONDS))
                accepted = {mode: one["accepted"] for mode, one in ranks[0].items() if one["accepted"] is not None}
                same = all(rank == ranks[0] for rank in ranks)
                answers = {mode: one["answer"] for mode, one in ranks[0].items()}
                passed = same and all(accepted.values())
                return {"passed": passed, "same on all ranks": same, "accepted guesses": accepted, "answers": answers}

            return call

        def compare(done: dict[str, Any], seconds: float) -> dict[str, Any]:
            runs = {key: done[key] for key in keys if key in done}
            if len(runs) < len(keys) or any("error" in item for item in runs.values()):
                raise RuntimeError("not all answers are there; run the part again.")
            answers = {
                f"{key} {mode}": one for key, item in runs.items() for mode, one in item.get("answers", {}).items()
            }
            expected = done["one rank"]["answers"]
            if dtype == "float32":
                return two_gpus_tokens.compare_exactly(answers, expected)
            return two_gpus_tokens.compare_families(answers, expected, common, seconds)

        keys = [f"ep{ep} {name}" for ep in eps for name in options.dispatchers]
        yield "one rank", one_rank
        for ep in eps:
            with rank_calls.team(TP, ep, options.device) as team:
                yield f"obstacles ep{ep}", _obstacles(options, ep, dtype, team)
                for name in options.dispatchers:
                    yield f"ep{ep} {name}", run(team, ep, name)
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
    """Two engines, one after the other: dispatchers that shard tokens hold the shared expert whole."""

    def items(options: Options) -> Items:
        cut = {"model": str(TINY_CHECKPOINT), "overrides": {}, "points": "1@64,4@100", "replays": 3}
        if not options.dry_run:
            points = "1@4096,4@4096,8@4096,16@4096,64@2048,128@1024"
            cut = {"model": str(FULL_CONFIG), "overrides": CUT, "points": points, "replays": 30}

        def measure(ranks: RankTeam, name: str) -> Item:
            def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
                if name in DISPATCHERS:
                    _able(done, ep, name)
                rows = two_gpus_steps.measure(ranks, name, min(seconds, STEPS_SECONDS))
                return {"cut": cut | {"model": model_name(cut["model"])}, "rows": rows}

            return call

        def hide(done: dict[str, Any], seconds: float) -> dict[str, Any]:
            found = hidden({name: item["rows"] for name, item in done.items() if "rows" in item})
            if not found:
                raise Unable(f"needs steps of {SILENT!r} and of a dispatcher that replicates tokens")
            return {"hidden": found}

        names = [name for name in options.dispatchers if name not in (*BACKENDS, ORACLE)]
        yield f"obstacles ep{ep}", _obstacles(options, ep)
        for base, more in (("allreduce", ("auto", SILENT)), ("nccl_agrs", ())):
            shards = dispatcher_class(base).shards_tokens
            kind = [name for name in names if dispatcher_class(name).shards_tokens == shards]
            with two_gpus_steps.team(cut | {"moe_comm": base}, TP, ep, options.device) as ranks:
                for name in (*kind, *filter(options.wants, more)):
                    yield name, measure(ranks, name)
        yield "hidden", hide

    return items


def _soak(ep: int) -> Callable[[Options], Items]:
    def items(options: Options) -> Items:
        sizes = _sizes(options) | {"width": 64 if options.dry_run else 1024}

        def soak(team: RankTeam, name: str) -> Item:
            replays = 100_000 if name.startswith("symm_") else 10_000  # kernels of this project, and the library's
            work = {"replays": replays, "sizes": SOAK_SIZES}
            if options.dry_run:
                work = {"replays": 60, "sizes": [1, 4, 8]}

            def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
                _able(done, ep, name)
                limit = min(seconds, ITEM_SECONDS)
                settings = sizes | work | {"dispatcher": name, "seconds": max(limit - 30, 10)}
                ranks = rank_calls.call(team, "benchmarks.two_gpus_soak:soak_of_rank", settings, limit)
                return {"passed": all(rank["passed"] for rank in ranks), "ranks": ranks}

            return call

        with rank_calls.team(TP, ep, options.device) as team:
            yield f"obstacles ep{ep}", _obstacles(options, ep, team=team)
            for name in options.dispatchers:
                yield name, soak(team, name)

    return items


def _programs(module: str, arguments: Callable[[Options], dict[str, list[str]]]) -> Callable[[Options], Items]:
    """An item for each key of `arguments`: the program with those."""

    def items(options: Options) -> Items:
        for key, words in arguments(options).items():
            _, call = next(program(module, lambda _, words=words: words)(options))
            yield key, _with_a_server(call) if "serve" in key or "http" in key else call

    return items


def _with_a_server(call: Item) -> Item:
    def checked(done: dict[str, Any], seconds: float) -> dict[str, Any]:
        missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
        if missing:
            raise Unable(f"needs {' and '.join(missing)}, not installed here")
        return call(done, seconds)

    return checked


def _drills(options: Options) -> dict[str, list[str]]:
    """Those that matter most first."""
    drills = [("llm", fault) for fault in ("kill", "stop", "disagree", "loop")] + [("torchrun", "kill")]
    drills += [("serve", "kill"), ("serve", "stop")]
    if options.dry_run:
        drills = [("llm", "kill"), ("llm", "disagree"), ("serve", "kill")]
    device = ["--device", options.device]
    return {f"{start} {fault}": [*device, "--starts", start, "--faults", fault] for start, fault in drills}


def _http(options: Options) -> dict[str, list[str]]:
    """Sliced experts on as much of the full model as two GPUs hold."""
    words = ["serve", "--preset", "http", "--tp", str(TP), "--device", options.device]
    if options.dry_run:
        words += ["--model", str(TINY_CHECKPOINT), "--clients", "1,3", "--rounds", "2", "--max-model-len", "512"]
        words += ["--prompt-tokens", "20", "--output-tokens", "8", "--kv-cache-memory-gb", "0.25"]
    else:
        words += ["--model", str(FULL_CONFIG), "--experts", str(CUT["n_routed_experts"]), "--rounds", "3"]
        words += ["--prompt-tokens", "256", "--output-tokens", "128", "--max-model-len", "4096"]
    return {"http ep1": words}


def _eagle3(options: Options) -> Items:
    """Sliced experts, and one request with whole ones."""
    full = {"model": str(FULL_CONFIG), "overrides": CUT, "tokens": 512}
    tiny = {"model": str(TINY_CHECKPOINT), "overrides": {"num_hidden_layers": 4}, "tokens": 24}
    tiny |= {"points": "1@64", "replays": 2, "chunk": 256}

    def forced(ep: int, points: str) -> Item:
        def call(_: dict, seconds: float) -> dict[str, Any]:
            settings = tiny if options.dry_run else full | {"points": points}
            found = eagle3_forced.measure(TP, ep, options.device, seconds, settings)
            return {"settings": settings | {"model": model_name(settings["model"])}, **found}

        return call

    yield "ep1", forced(1, "1@4096,8@4096")
    yield "ep2", forced(2, "1@4096")


def _backends(options: Options) -> Items:
    """Each is tried once: a refusal or a failure is a result here, in its own words."""
    sizes = _sizes(options)

    def trial(name: str) -> Item:
        def call(done: dict[str, Any], seconds: float) -> dict[str, Any]:
            facts = {"installed": two_gpus_latency.versions(BACKENDS[name])}
            reason = _reasons(done, TP)[name]
            if reason is not None:
                return facts | {"outcome": "refused", "reason": f"{name} {reason}"}
            settings = {"dispatcher": name, "rows": [1, 8, 64], **sizes}
            work = "benchmarks.two_gpus_latency:dispatcher_of_rank"
            try:
                rows = on_ranks(work, settings, TP, TP, options.device, min(seconds, 90.0))[0]
            except RuntimeError as error:
                return facts | {"outcome": "failed", "reason": str(error)}
            return facts | {"outcome": "ran", "rows": rows}

        return call

    yield f"obstacles ep{TP}", _obstacles(options, TP)
    yield from ((name, trial(name)) for name in BACKENDS)


PARTS = {
    "doctor": Part("links, latencies and the forecast of this machine", program("engine.doctor", _doctor), 75),
    "comm": Part(
        "every dispatcher and plain collective by rows in one run, G4, G4b; figures: comm_2xh200.json",
        program("engine.bench", _comm),
        70,
    ),
    "steps_ep1": Part(
        "steps of a 61-layer, 128-expert cut, sliced experts, G4c, G6; some figures: steps_2xh200_ep1.json",
        _steps(1),
        230,
    ),
    "steps_ep2": Part("the same with whole experts; some figures: steps_2xh200_ep2.json", _steps(2), 230),
    "eagle3": Part("that cut with a draft at forced accept lengths beside plain decoding, G5", _eagle3, 170),
    "http": Part(
        "that cut over HTTP against in process at 1, 8 and 64 clients, G8", _programs("engine.bench", _http), 140
    ),
    "tokens_bfloat16_ep2": Part(
        "every dispatcher's greedy tokens, with EAGLE-3 and without, in graphs and not; near-ties counted",
        _tokens("bfloat16", (2,)),
        110,
    ),
    "tokens_bfloat16_ep1": Part("the same with sliced experts", _tokens("bfloat16", (1,)), 100),
    "tokens_float32": Part("the same without graphs, in float32: one rank's, exactly", _tokens("float32", (2, 1)), 90),
    "drills": Part(
        "ranks that die, hang or disagree; a kill: drills_2xh200.json", _programs("benchmarks.drills", _drills), 190
    ),
    "soak_ep2": Part("100,000 random replays, 10,000 of what is NCCL's; whole experts", _soak(2), 70),
    "soak_ep1": Part("the same with sliced experts", _soak(1), 70),
    "backends": Part("deepep and nccl_ep, tried once each", _backends, 15),
    "latency": Part("as comm, each dispatcher in processes of its own, for where one ends the others", _latency, 120),
}
CALLS = (
    ("comm", "steps_ep1", "eagle3"),
    ("steps_ep2", "http", "backends"),
    ("drills", "soak_ep2", "soak_ep1"),
    ("tokens_bfloat16_ep2", "tokens_bfloat16_ep1", "tokens_float32"),
)
"""Parts of one session, a call each, what matters most first; `doctor` and `latency` add little to `comm`. Seconds of
parts that have not run on GPUs are estimates."""
