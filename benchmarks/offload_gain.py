"""Would it pay to keep cold KV blocks in the host's memory? A trace says how much is computed again, copies what that
could cost instead.

    python benchmarks/offload_gain.py --prefill-rate 20000 --json offload.json
    python benchmarks/offload_gain.py --device cpu --sessions 8 --turns 6 --layers 2      # a dry run

The trace is made from a seed: sessions of agents that share a few long system prompts, whose context grows turn by
turn with tool outputs and answers, with pauses in between. It is replayed on the engine's own block pool, with and
without a pool of blocks on the host behind it: prompts are computed one after another at `--prefill-rate` tokens a
second, answers beside them. Copies are timed on the device at hand, between a cache of the model's shape and pinned
memory.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.offload_copies import CopyTimes, measure_copies
from benchmarks.offload_trace import HostCosts, Replay, TraceShape, make_sessions, replay
from engine.bench.report import Report, format_table, publish
from engine.cache_plan import BLOCK_SIZE, GIB
from engine.config import DEVICES, ConfigError

LAYERS, WIDTH = 61, 576
"""Of Kimi-K2.5's cache: 576 numbers a token and layer, bfloat16."""
FAIR_GAIN = 0.10  # of the mean time to the first token, below which more parts are not worth it


def block_bytes(layers: int) -> int:
    return layers * BLOCK_SIZE * WIDTH * 2


def replays(args: argparse.Namespace, restore_seconds: float) -> list[dict[str, Any]]:
    """A row for each number of sessions and size of the pool, without a host pool and with each size of it."""
    costs, rows = HostCosts(1 / args.prefill_rate, restore_seconds), []
    for sessions, tokens in itertools.product(args.sessions, args.pool_tokens):
        alone = None
        for size in (0.0, *args.host_gb):
            trace = make_sessions(TraceShape(sessions, args.turns, args.seed))
            found = replay(trace, tokens // BLOCK_SIZE, int(size * GIB / block_bytes(LAYERS)), costs)
            alone = alone or found
            rows.append({"sessions": sessions} | _row(tokens, size, found, alone))
    return rows


def _row(tokens: int, host_gb: float, found: Replay, alone: Replay) -> dict[str, Any]:
    return {
        "pool tokens": tokens,
        "host GiB": host_gb,
        "prompt tokens": found.prompt_tokens,
        "cached": found.cached_tokens / found.prompt_tokens,
        "restored": found.restored_tokens / found.prompt_tokens,
        "computed again": found.again_tokens / found.prompt_tokens,
        "TTFT s": found.mean_ttft,
        "p90": found.p90_ttft,
        "saved": 1 - found.mean_ttft / alone.mean_ttft,
    }


def verdict(rows: list[dict[str, Any]], restore_ms: float, recompute_ms: float, pool_tokens: int) -> str:
    """Of the pool that is nearest to the engine's own."""
    nearest = min({row["pool tokens"] for row in rows}, key=lambda tokens: abs(tokens - pool_tokens))
    mine = [row for row in rows if row["pool tokens"] == nearest]
    gains = []
    for sessions in dict.fromkeys(row["sessions"] for row in mine):
        best = max((row for row in mine if row["sessions"] == sessions), key=lambda row: row["saved"])
        alone = next(row for row in mine if row["sessions"] == sessions)
        gains.append((best["saved"], f"{sessions}: {alone['computed again']:.0%}, {best['saved']:.0%}"))
    pays = max(saved for saved, _ in gains) >= FAIR_GAIN and restore_ms < recompute_ms
    return (
        f"Verdict: offload {'pays' if pays else 'does not pay'} at a pool of {nearest} tokens. A thousand tokens take "
        f"{recompute_ms:.1f} ms to compute and {restore_ms:.2f} ms to bring back. Sessions at a time: prompt tokens "
        f"computed again without a host pool, time to the first token saved by one: "
        f"{'; '.join(words for _, words in gains)}."
    )


def run(args: argparse.Namespace) -> Report:
    if args.prefill_rate <= 0 or min(args.pool_tokens) < 2 * BLOCK_SIZE:
        raise ConfigError("--prefill-rate must be above 0 and pools hold two blocks at least.")
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    copies = measure_copies(device, args.layers or LAYERS, args.copy_blocks, WIDTH, args.repeats)
    restore = best_restore(copies, args.layers or LAYERS)
    rows = replays(args, restore / BLOCK_SIZE)
    recompute_ms, restore_ms = 1e6 / args.prefill_rate, restore / BLOCK_SIZE * 1e6
    notes = [
        "Shares of all prompt tokens; computed again: had been computed and was evicted. saved: of the mean TTFT, "
        f"which counts waiting, computing at {args.prefill_rate:.0f} tokens/s and restoring.",
        "\nCopies of blocks, pinned memory; us a block of all layers; strided: each layer's piece by itself:",
        format_table([copy.row() for copy in copies]),
        verdict(rows, restore_ms, recompute_ms, args.engine_tokens),
    ]
    data = {"copies": [copy.row() for copy in copies], "verdict": notes[-1], "block_bytes": block_bytes(LAYERS)}
    data |= {"settings": {name: value for name, value in vars(args).items() if name != "json"}}
    return Report("KV blocks on the host: what a trace gains", rows, notes, data)


def best_restore(copies: list[CopyTimes], layers: int) -> float:
    """Seconds of a block of all the model's layers, copied the fastest way to the device."""
    return min(copy.seconds_a_block for copy in copies if copy.direction == "to device") * LAYERS / layers


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--prefill-rate", type=float, default=10000.0, help="tokens/s of a share (default 10000)")
    parser.add_argument(
        "--engine-tokens", type=int, default=750_000, help="KV tokens of the real pool, for the verdict"
    )
    parser.add_argument("--pool-tokens", type=int, nargs="+", default=[250_000, 500_000, 750_000])
    parser.add_argument("--host-gb", type=float, nargs="+", default=[32.0, 128.0], help="GiB a rank (default 32 128)")
    parser.add_argument("--sessions", type=int, nargs="+", default=[8, 24, 64], help="at a time (default 8 24 64)")
    parser.add_argument("--turns", type=int, default=12, help="of a session, about (default 12)")
    parser.add_argument("--layers", type=int, help="of the cache that copies are timed on (default: all)")
    parser.add_argument("--copy-blocks", type=int, nargs="+", default=[1, 8, 64], help="blocks a copy (default 1 8 64)")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the result")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    given = sys.argv[1:] if argv is None else argv
    publish(run(args), ["python", "benchmarks/offload_gain.py", *given], args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
