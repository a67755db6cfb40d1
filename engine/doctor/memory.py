"""What a rank's memory holds, and over how many GPUs the model fits: the preflight's sum as a section."""

from __future__ import annotations

from typing import Any

from engine.cache_plan import GIB
from engine.config import ConfigError
from engine.doctor.report import Section
from engine.doctor.settings import Settings
from engine.preflight import Subject, verdict, weigh, worlds

COMMON_MEMORY = 97_887 * 2**20
"""A GPU's memory to reckon with where there is none: the founding host's kind."""


def memory_section(settings: Settings, total: int | None) -> tuple[Section, dict[str, Any]]:
    """The section, and what scripts read of it: "fits", "verdict" and the sum of each number of ranks.

    total: bytes of each GPU, None where there is none. Raises ConfigError for a draft or a directory that makes no
    sense."""
    config, memory = settings.engine_config(), total or COMMON_MEMORY
    subject = Subject.read(config)
    sums = [one for one in worlds(config, subject, memory) if one.tp <= 2 * settings.tp]
    try:
        found = weigh(config, subject, memory)
        fits, said = found.fits, verdict(config, subject, found)
    except ConfigError as error:
        fits, said = False, f"does not fit: {error}"
    rows = [one.row() for one in sums]
    notes = [
        said[0].upper() + said[1:],
        "GiB a rank by kind. KV kB/token is on every rank. Weights and KV are counted to the byte; a step is an "
        "allowance, and a start measures it.",
    ]
    if total is None:
        notes.append(f"No GPU here: reckoned for one of {COMMON_MEMORY / GIB:.1f} GiB.")
    return Section("Memory", rows, notes), {"fits": fits, "verdict": said, "total": memory, "worlds": rows}
