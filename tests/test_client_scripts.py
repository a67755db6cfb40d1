"""The runner of `tests/clients`: every script it names is there, and what goes wrong in one is a failed row."""

from __future__ import annotations

import json
import sys
import time

import pytest

from tests.clients import run

TARGET = ["--url", "http://127.0.0.1:9", "--key", "k", "--model", "m"]
FAILS = """
from steps import run
def good(target):
    "a good check"
    return target.base
def bad(target):
    "a bad check"
    assert target.model == "other", "not the model"
run("pytest", [good, bad])
"""


@pytest.fixture
def one_script(tmp_path, monkeypatch):
    """Runs `code` as a client's script for at most some seconds and gives the rows."""
    for name in ("steps.py",):
        (tmp_path / name).write_text((run.HERE / name).read_text())
    monkeypatch.setattr(run, "HERE", tmp_path)

    def rows(code: str, seconds: float = 60) -> list[dict]:
        (tmp_path / "client.py").write_text(code)
        (tmp_path / "work").mkdir()
        return run._run(run.Script("client", "none", seconds), sys.executable, TARGET, tmp_path / "work")

    return rows


def test_every_script_and_its_requirements_are_there():
    files = {path.stem for path in run.HERE.glob("*.py")} - {"run", "run_schemathesis", "steps", "local_tokenizer"}
    assert {script.name for script in run.SCRIPTS} == files
    assert {script.environment for script in run.SCRIPTS} == {p.stem for p in run.HERE.glob("requirements/*.txt")}


def test_a_failed_check_is_a_row_with_its_reason(one_script, capsys):
    good, bad = one_script(FAILS)
    assert (good["ok"], good["note"], good["check"]) == (True, "http://127.0.0.1:9/v1", "a good check")
    assert (bad["ok"], bad["client"]) == (False, "pytest") and "not the model" in bad["note"]
    assert "AssertionError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "note"), [("import no_such_module", "exit code 1"), ("import time; time.sleep(60)", "not done within")]
)
def test_a_script_that_reports_nothing_is_a_failed_row(one_script, code, note):
    started = time.monotonic()
    (row,) = one_script(code, 0.5 if "sleep" in code else 60)
    assert not row["ok"] and row["note"].startswith(note) and time.monotonic() - started < 30


def test_ignored_fields_are_read_out_of_the_servers_log():
    log = "WARNING request a: ignored fields 'store', 'foo'\nINFO served\nWARNING request b: ignored fields 'foo'\n"
    assert run._ignored(log) == ["foo", "store"] and run._ignored("INFO served") == []


def test_the_result_file_names_versions_and_no_key(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/someone/run.py", "--json", "out.json"])
    row = {"client": "openai", "version": "1.2", "check": "chat", "ok": True, "note": "", "seconds": 1.0}
    run._write(str(tmp_path / "out.json"), [row, row | {"ok": False}], {"tracebacks": 0})
    text = (tmp_path / "out.json").read_text()
    found = json.loads(text)
    assert (found["num_checks"], found["num_ok"], found["clients"]) == (2, 1, {"openai": "1.2"})
    assert found["command"] == "python tests/clients/run.py --json out.json" and run.KEY not in text
