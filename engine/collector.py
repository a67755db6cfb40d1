"""Python's cyclic garbage collector in a process that serves."""

from __future__ import annotations

import gc


def spare_the_engine() -> None:
    """Called once the engine stands, by processes that do nothing else: what there is now lives as long as they do.

    A full collection would look through all of it, some 200,000 objects, and hold up every stream for about 0.1 s.
    """
    gc.collect()
    gc.freeze()
