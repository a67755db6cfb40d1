"""What every client script shares: where the server is, the questions its small model can answer, and a record of each
check as it ends.

A script gives `run` its checks, functions of a `Target` whose docstring says what they do. A check fails by raising.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUM = [{"role": "user", "content": "What is 17 + 25?"}]
SUM_ANSWER = "17 + 25 = 42."
PERSON = [
    {
        "role": "user",
        "content": "Give me a JSON object with name, age and city: Tom is 30 years old and lives in Rome.",
    }
]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City name"}},
            "required": ["city"],
        },
    },
}
ADD_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
INSTANT = {"chat_template_kwargs": {"thinking": False}}


@dataclass(frozen=True)
class Target:
    """url: the server, without /v1. directory: empty, for files that a client wants."""

    url: str
    key: str
    model: str
    directory: Path

    @property
    def base(self) -> str:
        return f"{self.url}/v1"


Check = Callable[[Target], str | None]


def run(package: str, checks: Sequence[Check]) -> None:
    """Runs the checks in turn, appends a JSON line for each to --report, and exits with 1 if one failed."""
    target, report = _arguments()
    version = importlib.metadata.version(package)
    failed = False
    for check in checks:
        started = time.monotonic()
        row: dict[str, Any] = {"client": package, "version": version, "check": (check.__doc__ or "").strip()}
        try:
            row |= {"ok": True, "note": check(target) or ""}
        except Exception as error:  # whatever a client raises is this check's outcome
            traceback.print_exc(limit=-3)
            row |= {"ok": False, "note": f"{type(error).__name__}: {error}"[:300]}
            failed = True
        row["seconds"] = round(time.monotonic() - started, 2)
        with open(report, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    sys.exit(failed)


def _arguments() -> tuple[Target, Path]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    given = parser.parse_args()
    return Target(given.url, given.key, given.model, given.directory), given.report


def call_of_weather(name: str, arguments: str | dict[str, Any]) -> None:
    """Asserts that a call is of get_weather with the one argument that its schema asks for."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather", name
    assert set(values) == {"city"} and isinstance(values["city"], str), values
