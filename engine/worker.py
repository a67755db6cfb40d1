"""`python -m engine.worker`: one rank that rank 0 starts by itself, on the same host."""

from __future__ import annotations

import argparse
import signal
import sys

from engine import log
from engine.launch import start_worker


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank of a Turnout engine, started by rank 0.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--store", required=True, metavar="HOST:PORT")
    parser.add_argument("--log-level", default="warning")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
    log.setup(arguments.log_level, arguments.rank)
    follower, ranks = start_worker(arguments.rank, arguments.world_size, arguments.store)
    return follow(follower, ranks)


def follow(follower, ranks) -> int:
    """Serves rank 0 until it is done; says why if a step fails."""
    try:
        while follower.follow() is not None:
            pass
    except Exception as error:
        ranks.control.report_failure(f"failed: {type(error).__name__}: {error}")
        log.logger.exception("rank %d failed", ranks.rank)
        return 1
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
