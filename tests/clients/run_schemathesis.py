"""Runs schemathesis against the OpenAPI page of the real server over a core without a model, and counts what it did.

    python -m tests.clients.run_schemathesis --schemathesis DIR/bin/schemathesis [--examples 400] [--json FILE]

schemathesis lives in an environment of its own: `python -m venv DIR && DIR/bin/pip install schemathesis`. Every check
is on but two: that a body which fits the schema is accepted (a model that is not served fits it), and that a call
without a key is refused (the server here has none; tests/engine/server/test_access.py tries every route).
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.engine.server.harness import emit, make_core, serving

LEFT_OUT = ("positive_data_acceptance", "ignored_auth")
PHASES = "examples,coverage,fuzzing"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemathesis", default="schemathesis", metavar="PROGRAM")
    parser.add_argument(
        "--examples", type=int, default=400, help="random cases an operation, besides those of coverage"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="the counts, for scripts")
    parser.add_argument("--show", type=int, default=60, help="lines of its output to show")
    return parser.parse_args()


def command(arguments: argparse.Namespace, url: str) -> list[str]:
    options = ["--checks", "all", "--exclude-checks", ",".join(LEFT_OUT), "--phases", PHASES]
    options += ["-n", str(arguments.examples), "--seed", str(arguments.seed), "--continue-on-failure", "--no-shrink"]
    options += ["--max-failures", "1000"]
    return [arguments.schemathesis, "run", f"{url}/openapi.json", *options]


class StatusCounter(logging.Handler):
    """Counts answers by status, from the access log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.statuses: Counter = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.statuses[record.args[2]] += 1


def listen(counter: StatusCounter) -> None:
    logger = logging.getLogger("turnout.access")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(counter)
    logging.getLogger("turnout.server").setLevel(logging.ERROR)  # not a line for every field that was ignored


def main() -> int:
    arguments = parse_arguments()
    core, counter = make_core(default_script=emit("thoughts</think>answer")), StatusCounter()
    with serving(core) as server:
        listen(counter)
        done = subprocess.run(command(arguments, server.url), capture_output=True, text=True)
        print("\n".join(done.stdout.splitlines()[-arguments.show :]), done.stderr[-2000:])
        is_healthy = server.client.is_healthy and not core.running
    statuses = counter.statuses
    counts = {
        "cases": statuses.total(),
        "by_status": {str(status): statuses[status] for status in sorted(statuses)},
        "server_errors": sum(count for status, count in statuses.items() if status >= 500 or status == 0),
        "exit_code": done.returncode,
        "is_healthy": is_healthy,
    }
    print(json.dumps(counts))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(counts, indent=1) + "\n")
    return 0 if is_healthy and not counts["server_errors"] and done.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
