"""One logger for the project; every line carries the rank once it is known."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("turnout")


def setup(level: str = "info", rank: int = 0) -> None:
    """Sends the project's log lines to stderr; called by entry points only, never by the library."""
    handler = logging.StreamHandler(sys.stderr)
    erase = "\x1b[K" if sys.stderr.isatty() else ""  # a bar that is drawn there, of which the cursor is at the begin
    handler.setFormatter(logging.Formatter(f"{erase}%(asctime)s %(levelname)s [rank {rank}] %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def level() -> str:
    """The level in force, as `setup` takes it."""
    return logging.getLevelName(logger.getEffectiveLevel()).lower()
