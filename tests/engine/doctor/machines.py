"""Machines with known links, for the doctor's sums."""

from __future__ import annotations

import json

from engine.config import FULL_CONFIG
from engine.doctor.forecast import Efficiency, Machine
from engine.doctor.placement import Placement
from models.kimi_k25.config import KimiConfig

FULL = KimiConfig.from_dict(json.loads((FULL_CONFIG / "config.json").read_text()))
TP8 = Placement(FULL, 8, 1)
ROUNDS = 122


def machine(round_us: dict[int, float], bandwidth: float = 1.6e12, efficiency: float = 0.44) -> Machine:
    """A host whose every round of so many rows takes so many microseconds."""
    seconds = {rows: us * 1e-6 for rows, us in round_us.items()}
    step = {rows: ROUNDS * one for rows, one in seconds.items()}
    return Machine(bandwidth, Efficiency({1: efficiency}, "given"), step, seconds)
