"""Runs unchanged clients and tools against a real server on the bundled checkpoint.

    python tests/clients/run.py                        # all of them, each in the environment it needs
    python tests/clients/run.py --only openai_chat,llm_cli --json FILE

Each group of clients has a virtual environment of its own under `.venv-clients`, made on first use from
`tests/clients/requirements`, since their bounds exclude each other. Prints a table of what every check did; exit code 1
if one failed. `--python` takes one environment that has everything instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from engine.bench.report import environment, format_table
from tests.processes import PYTHON, ROOT, serving

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = ROOT / ".venv-clients"
KEY = "clients-check"
# Few run and few wait, so that a handful of requests fills the queue.
SERVER_OPTIONS = ("--draft", "auto", "--api-key", KEY, "--max-num-seqs", "16", "--max-queued-requests", "32")


@dataclass(frozen=True)
class Script:
    """A client's script, the environment it runs in, and the seconds it may take."""

    name: str
    environment: str
    seconds: int = 120


SCRIPTS = (
    Script("openai_chat", "sdk"),
    Script("openai_tools", "sdk"),
    Script("openai_errors", "sdk"),
    Script("contracts", "sdk", 420),
    Script("litellm_client", "sdk"),
    Script("langchain_client", "sdk"),
    Script("instructor_client", "instructor"),
    Script("llm_cli", "sdk", 240),
    Script("pydantic_ai_client", "sdk"),
    Script("agents_client", "sdk"),
    Script("raw_stream", "sdk"),
    Script("prometheus_page", "sdk"),
    Script("lm_eval_tasks", "evals", 300),
    Script("guidellm_load", "guidellm", 300),
    Script("aiperf_load", "aiperf", 300),
)


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    scripts = [script for script in SCRIPTS if not arguments.only or script.name in arguments.only]
    pythons = {script.environment: _python(script.environment, arguments) for script in scripts}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, serving(PYTHON, Path(scratch), *SERVER_OPTIONS) as (program, port):
        for script in scripts:
            directory = Path(scratch) / script.name
            directory.mkdir()
            target = ["--url", f"http://127.0.0.1:{port}", "--key", KEY, "--model", arguments.model]
            rows += _run(script, pythons[script.environment], target, directory)
            assert program.process.poll() is None, f"the server ended during {script.name}:\n{program.output}"
        log = program.output
    server = {"tracebacks": log.count("Traceback"), "ignored_fields": _ignored(log)}
    print(format_table([_shown(row) for row in rows]))
    failed = [row for row in rows if not row["ok"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} checks ok; {server['tracebacks']} tracebacks in the server's log")
    print(f"fields that clients sent and the server ignored: {', '.join(server['ignored_fields']) or 'none'}")
    if arguments.json:
        _write(arguments.json, rows, server)
    return 1 if failed or server["tracebacks"] else 0


def _ignored(log: str) -> list[str]:
    """The fields of which the server said in its log that they have no effect."""
    lines = re.findall(r"ignored fields (.+)$", log, re.MULTILINE)
    return sorted({name.strip("'") for line in lines for name in line.split(", ")})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [script.name for script in SCRIPTS]
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"some of {', '.join(names)}")
    parser.add_argument("--python", help="an interpreter with every client installed (default: makes environments)")
    parser.add_argument("--pip-options", default="", help="passed on to pip install")
    parser.add_argument("--json", metavar="FILE", help="writes the outcome")
    parser.add_argument("--model", default="tiny", help="the served model's name")
    arguments = parser.parse_args()
    unknown = set(arguments.only or ()) - set(names)
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    return arguments


def _python(name: str, arguments: argparse.Namespace) -> str:
    """The interpreter of an environment, which is made if it is absent or its requirements have changed."""
    if arguments.python:
        return arguments.python
    directory, wanted = ENVIRONMENTS / name, HERE / "requirements" / f"{name}.txt"
    python, stamp = directory / "bin" / "python", directory / ".installed"
    if stamp.is_file() and stamp.read_text() == wanted.read_text():
        return str(python)
    print(f"installing the clients of {wanted.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments.pip_options.split(), "-r", str(wanted)], check=True)
    stamp.write_text(wanted.read_text())
    return str(python)


def _run(script: Script, python: str, target: list[str], directory: Path) -> list[dict[str, Any]]:
    """The rows that a script reported; one more if it did not end well and reported no failure."""
    report, log = directory / "report.jsonl", directory / "log"
    empty = directory / "files"
    empty.mkdir()
    command = [python, str(HERE / f"{script.name}.py"), *target, "--directory", str(empty), "--report", str(report)]
    started = time.monotonic()
    with open(log, "wb") as output:
        ended = _within(command, script.seconds, output, empty)
    rows = [json.loads(line) for line in report.read_text().splitlines()] if report.is_file() else []
    if ended is None or (ended != 0 and all(row["ok"] for row in rows)):
        what = f"not done within {script.seconds} s" if ended is None else f"exit code {ended}"
        seconds = round(time.monotonic() - started, 2)
        rows.append({"client": "?", "version": "", "check": "", "ok": False, "note": what, "seconds": seconds})
    if not all(row["ok"] for row in rows):
        print(f"---- {script.name}\n{log.read_text(errors='replace')[-6000:]}", flush=True)
    return [{"script": script.name} | row for row in rows]


def _within(command: list[str], seconds: int, output: Any, directory: Path) -> int | None:
    """The exit code, or None if the time ran out; ends whatever the command started.

    The clients find no settings of the user's: their home is an empty directory.
    """
    settings = {"HOME": str(directory), "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI_"))}
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=kept | settings,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # nothing may be left of it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "client": f"{row['client']} {row['version']}".strip(),
        "check": row["check"][:90],
        "outcome": "ok" if row["ok"] else "FAILED",
        "s": row["seconds"],
        "note": " ".join(row["note"].split())[:100],
    }


def _write(file: str, rows: list[dict[str, Any]], server: dict[str, Any]) -> None:
    content = {
        "title": "Unchanged clients against the server on the bundled checkpoint",
        **environment(["python", "tests/clients/run.py", *sys.argv[1:]]),
        "server": {
            "command": shlex.join(["serve.py", *("KEY" if option == KEY else option for option in SERVER_OPTIONS)]),
            **server,
        },
        "clients": dict(sorted({row["client"]: row["version"] for row in rows}.items())),
        "num_checks": len(rows),
        "num_ok": sum(row["ok"] for row in rows),
        "rows": rows,
    }
    Path(file).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
