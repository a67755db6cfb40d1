"""What the project's model says of full-size figures before they are measured: Kimi-K2.5 on H200s over NVLink.

Kernels: the bytes of a step over the read rate and the efficiency of one rank's share that was measured on one H200
(engine/doctor/findings.py). Rounds: engine/doctor/modelled.py, extrapolated from two GPUs. Nothing is taken from the
results that it stands beside.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from typing import Any

from benchmarks.full_size_shape import NUM_GUESSES, REPLICATED, SHARDED
from benchmarks.ranks import ROOT
from engine.comm import choice_rule
from engine.comm.dispatcher import dispatcher_class
from engine.config import FULL_CONFIG
from engine.doctor.findings import H200_EFFICIENCY
from engine.doctor.forecast import Forecast, Machine, forecast
from engine.doctor.modelled import NVLINK, layer, rows_sent
from engine.doctor.placement import Placement, Rounds
from engine.doctor.settings import Settings

SHARE_FILE = ROOT / "benchmarks" / "step_tp8_h200.json"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class FullModel:
    """Forecasts for tp ranks in ep groups; experts: routed ones of a layer, the model's own where None."""

    def __init__(self, tp: int, ep: int, experts: int | None = None):
        config = Settings(tp, ep, "cuda", str(FULL_CONFIG)).model_config()
        if experts is not None:
            config = replace(config, n_routed_experts=experts)
        self.placement = Placement(config, tp, ep)
        self._share = json.loads(SHARE_FILE.read_text())

    def obstacle(self, name: str) -> str | None:
        """Why there is no forecast of a dispatcher."""
        if name == "nccl_a2a":
            return "NCCL's all-to-all was not measured between GPUs, so it is not modelled"
        if name in SHARDED and self.placement.ep != self.placement.tp:
            return "sharded tokens are modelled with whole experts alone"
        return None

    def comm_us(self, name: str, rows: int) -> float | None:
        """Microseconds of all rounds of a step."""
        if self.obstacle(name) is not None:
            return None
        return 1e6 * self.placement.comm_seconds(self._rounds(self.used(name, rows), rows))

    def step_ms(self, name: str, rows: int, context: int) -> float | None:
        """Milliseconds of a decode step of `rows` requests."""
        comm = self.comm_us(name, rows)
        if comm is None:
            return None
        read = self.placement.bytes_read(rows, context, rows) + self._whole_shared_expert(name)
        kernels = read / self._share["read_bytes_per_second"] / H200_EFFICIENCY.at(rows)
        return 1e3 * kernels + comm / 1e3

    def num_rounds(self, name: str) -> int:
        """Of a step, those of its layers that carry bytes; the head's and the embedding's come on top."""
        reduces, dispatches, combines = self.placement.verbs()
        return reduces + combines + (dispatches if name in SHARDED else 0)

    def num_bytes(self, name: str, rows: int) -> float | None:
        """That the busiest rank sends in the rounds of a step's layers, with uniform routing."""
        if self.obstacle(name) is not None:
            return None
        config, ranks = self.placement.config, self.placement.tp
        sizes = (rows, ranks, config.n_routed_experts, config.num_experts_per_tok)
        return sum(rows_sent(self.used(name, rows), *sizes)) * config.hidden_size * 2 * config.num_hidden_layers

    def used(self, name: str, rows: int) -> str:
        """The dispatcher that `name` is at so many rows."""
        return self._auto[min(size for size in SIZES if size >= min(rows, SIZES[-1]))] if name == "auto" else name

    def speedup(self, accept_length: float) -> float:
        """Of one request with NUM_GUESSES guesses over plain decoding."""
        return self.speculation.rate(NUM_GUESSES, accept_length) / self.speculation.plain_rate

    def best_speedup(self, accept_length: float) -> tuple[int, float]:
        """(number of guesses, gain) that goes fastest; accept_length: that of NUM_GUESSES guesses."""
        return self.speculation.best(accept_length)

    @cached_property
    def speculation(self) -> Forecast:
        """Of one request at 4,096 tokens through `auto`."""
        comm = {rows: self.comm_us("auto", rows) / 1e6 for rows in SIZES}
        one = {rows: self._rounds(self.used("auto", rows), rows).reduce.seconds for rows in SIZES}
        machine = Machine(self._share["read_bytes_per_second"], H200_EFFICIENCY, comm, one)
        return forecast(self.placement, machine)

    @property
    def prefill_ms(self) -> float | None:
        """Milliseconds of a fresh prompt of 8,192 tokens as one share of eight took, slices of all 384 experts and no
        communication: a lower bound. None for other shares."""
        config = self.placement.config
        if self.placement.tp != 8 or config.n_routed_experts != self._full.n_routed_experts:
            return None
        return next(row["ms"] for row in self._share["rows"] if row["step"] == "prefill 8192")

    @cached_property
    def _full(self) -> Any:
        return Settings(8, 8, "cuda", str(FULL_CONFIG)).model_config()

    @cached_property
    def _auto(self) -> dict[int, str]:
        names = [name for name in REPLICATED if name != "auto"]
        times = {name: {rows: self._layer_seconds(name, rows) for rows in SIZES} for name in names}
        return choice_rule.choose(times, {name: dispatcher_class(name).family for name in names})

    def _layer_seconds(self, name: str, rows: int) -> float:
        rounds = self._rounds(name, rows)
        return rounds.reduce.seconds + rounds.dispatch.seconds + rounds.combine.seconds

    def _rounds(self, name: str, rows: int) -> Rounds:
        return layer(name, NVLINK, rows, self.placement)

    def _whole_shared_expert(self, name: str) -> float:
        """Bytes that a rank reads more where tokens are sharded: it holds the shared expert whole."""
        sizes = self.placement.sizes
        return sizes.shared * (self.placement.tp - 1) * 2 * sizes.moe_layers if name in SHARDED else 0.0
