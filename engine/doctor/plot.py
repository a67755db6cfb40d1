"""Latency over rows as a PNG, one line a dispatcher, the fastest one marked at every size. Needs the extra `plot`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from engine.config import ConfigError
from engine.doctor.findings import Findings
from engine.doctor.placement import Placement


def check(path: str) -> None:
    """Raises ConfigError where a PNG could not be drawn there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install Turnout with the extra plot (pip install 'turnout[plot]').")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: its folder does not exist; make it first.")


def draw(path: str, findings: Findings, placement: Placement, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    layers, curves = placement.verbs()[0], {}
    for name, by_rows in findings.dispatchers.items():
        curves[name] = {t: placement.comm_seconds(rounds) / layers * 1e6 for t, rounds in sorted(by_rows.items())}
        axes.plot(list(curves[name]), list(curves[name].values()), marker=".", label=name)
    for name, by_rows in findings.collectives.items():
        us = [seconds * 1e6 for seconds in by_rows.values()]
        axes.plot(list(by_rows), us, linestyle=":", linewidth=1, label=f"{name}, one call")
    winners = findings.winners(placement)
    best = [curves[name][t] for t, name in winners.items()]
    axes.plot(list(winners), best, "o", markersize=11, fillstyle="none", color="black", label="fastest dispatcher")
    axes.set(xscale="log", yscale="log", xlabel="T, rows of a step", ylabel="us: a layer's rounds", title=title)
    axes.set_xticks(list(winners), labels=[str(t) for t in winners], minor=False)
    axes.minorticks_off()
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
