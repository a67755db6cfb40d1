"""`python -m engine.worker`: one rank that rank 0 starts by itself, on the same host."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

from engine import log
from engine.collector import spare_the_engine
from engine.errors import EngineDeadError

_GRACE_SECONDS = 1.0


def main() -> int:
    threading.Thread(target=_end_with_rank_0, name="rank-0-pipe", daemon=True).start()
    parser = argparse.ArgumentParser(description="One rank of a Turnout engine, started by rank 0.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--store", required=True, metavar="HOST:PORT")
    parser.add_argument("--log-level", default="warning")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
    log.setup(arguments.log_level, arguments.rank)
    from engine.launch import start_worker  # takes seconds, in which rank 0 may already be gone

    try:
        follower, ranks = start_worker(arguments.rank, arguments.world_size, arguments.store)
    except EngineDeadError:  # rank 0 has given the reason
        return 1
    except Exception as error:
        log.logger.error("rank %d could not start: %s", arguments.rank, error)
        return 1
    return follow(follower, ranks)


def _end_with_rank_0() -> None:
    """The pipe at stdin closes when rank 0 ends, however it ends. A rank that is told to stop has a moment for it."""
    while os.read(0, 1024):
        pass
    threading.Event().wait(_GRACE_SECONDS)
    os._exit(1)


def follow(follower, ranks) -> int:
    """Serves rank 0 until it is done; the log says why if a step fails."""
    spare_the_engine()
    try:
        while follower.follow() is not None:
            pass
    except EngineDeadError:  # rank 0 has given the reason
        return 1
    except Exception:
        log.logger.exception("rank %d failed", ranks.rank)
        return 1
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
