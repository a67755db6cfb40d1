"""A mark names one process: no other, none of another host, and not the one that asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from engine.comm.process_mark import kill_if_here, own_mark

SCRIPT = (
    "import json; from engine.comm.process_mark import own_mark; print(json.dumps(own_mark()), flush=True); input()"
)


@pytest.fixture
def process():
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_a_stopped_process_is_killed_by_its_mark(process):
    mark = json.loads(process.stdout.readline())
    assert mark[2] == process.pid and mark[:2] == own_mark()[:2]
    for wrong in ([*mark[:3], mark[3] + 1], ["another boot", *mark[1:]], [mark[0], "pid:[1]", *mark[2:]]):
        assert not kill_if_here(wrong)
    process.send_signal(signal.SIGSTOP)
    assert kill_if_here(mark)
    assert process.wait(20) == -signal.SIGKILL and not kill_if_here(mark)


def test_nobody_kills_itself():
    assert not kill_if_here(own_mark()) and not kill_if_here(None) and own_mark()[2] == os.getpid()
