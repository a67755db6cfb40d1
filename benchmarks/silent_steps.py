"""The same steps without their rounds, on ranks that keep their weights: what communication adds to a step, and how
much of it other work hides (goal G4c).

A silent step computes all else that a step does, the residual sums and norms of its rounds included, on this rank's
partial sums alone. With whole experts its ranks route apart, since each has other hidden states; with sliced ones every
rank reads as much as in a real step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.rank_steps import limits_of
from engine.bench.comm import hidden_fraction
from engine.comm.choice import DispatcherChoice
from engine.comm.timing import time_dispatcher
from engine.doctor.placement import Placement
from engine.model_runner import ModelRunner

SILENT = "silent"


@torch.inference_mode()
def silence(runner: ModelRunner) -> None:
    """From here on no verb of the runner's dispatcher exchanges anything. The runner must replicate tokens; steps run
    without graphs until they are captured anew."""
    runner.drop_graphs()
    runner.dispatchers.close()
    runner.dispatchers = DispatcherChoice("auto", replace(runner.parallel, is_share=True), limits_of(runner))


def rounds_ms(runner: ModelRunner, num_rows: int, silent: bool = False) -> float:
    """Milliseconds of all rounds of a step by themselves, residual and norm included; of the slowest rank, or where
    they are silent of this one."""
    parallel = replace(runner.parallel, is_share=True) if silent else runner.parallel
    times = time_dispatcher(runner.dispatchers.for_rows(num_rows), num_rows, limits_of(runner), parallel)
    counts = Placement(runner.model_config, 1, 1).verbs()
    return 1e3 * sum(n * s for n, s in zip(counts, (times.reduce, times.dispatch, times.combine), strict=True))


def hidden(rows: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Dispatcher -> "batch @ context" -> {"hidden", "net"} of rows that have "ms" and "rounds ms", silent ones among
    them; nothing without those.

    hidden: 1 - (step - silent step) / rounds by themselves. net: the same without the time that residual and norm take
    in both; None where nothing is left."""
    quiet = {row["step"]: row for row in rows.get(SILENT, ())}
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for name, measured in rows.items():
        for row in measured if name != SILENT else ():
            if row["step"] in quiet:
                found.setdefault(name, {})[row["step"].removeprefix("decode ")] = _hidden(row, quiet[row["step"]])
    return found


def _hidden(row: dict[str, Any], quiet: dict[str, Any]) -> dict[str, float | None]:
    sent = row["rounds ms"] - quiet["rounds ms"]
    return {
        "hidden": hidden_fraction(row["ms"], quiet["ms"], row["rounds ms"]),
        "net": hidden_fraction(row["ms"], quiet["ms"], sent) if sent > 0 else None,
    }
