"""A headless Chromium, driven through its DevTools protocol over a pair of pipes; needs no further package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
READ_FD, WRITE_FD = 3, 4  # where Chromium looks for its pipes
SECONDS = 60


class Tab:
    """One page of the browser. `problems`: its console errors, uncaught exceptions and refused contents so far."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from = to_browser, from_browser
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requested: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command; events that come before it are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _next(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._from], [], [], left)[0], f"no answer to {waiting_for}"
            part = os.read(self._from, 1 << 20)
            assert part, f"the browser ended during {waiting_for}"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert", "warning"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, condition: str, seconds: float = SECONDS) -> Any:
        """The value of a JavaScript expression once it is truthy."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(condition)):
            seen = "document.body.innerText"
            assert time.monotonic() < deadline, (
                f"not within {seconds} s: {condition}\n{self.problems}\n{self.run(seen)}"
            )
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'")

    def type(self, text: str, key: str | None = None) -> None:
        """Types into whatever has the focus, then presses `key`."""
        if text:
            self.send("Input.insertText", text=text)
        if key:
            code = {"Enter": 13, "ArrowRight": 39, "ArrowDown": 40}[key]
            more = {"key": key, "code": key, "windowsVirtualKeyCode": code} | ({"text": "\r"} if key == "Enter" else {})
            self.send("Input.dispatchKeyEvent", type="keyDown", **more)
            self.send("Input.dispatchKeyEvent", type="keyUp", **more)

    def look(self, width: int, height: int, scheme: str = "dark", is_mobile: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_mobile
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, file: Path, is_whole: bool = False) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)["data"]
        file.write_bytes(base64.b64decode(data))


@contextmanager
def browsing(directory: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, whose profile lies in `directory`."""
    # High numbers first, so that none of them is one that the browser's are moved to.
    theirs_read, ours_write = (_high(fd) for fd in os.pipe())
    ours_read, theirs_write = (_high(fd) for fd in os.pipe())
    profile = directory / "profile"
    command = [BINARY, *FLAGS, f"--user-data-dir={profile}"]
    moves = [(os.POSIX_SPAWN_DUP2, theirs_read, READ_FD), (os.POSIX_SPAWN_DUP2, theirs_write, WRITE_FD)]
    log = (os.POSIX_SPAWN_OPEN, 2, str(directory / "chromium.log"), os.O_WRONLY | os.O_CREAT, 0o600)
    process = os.posix_spawn(BINARY, command, os.environ, file_actions=[*moves, log])
    os.close(theirs_read)
    os.close(theirs_write)
    try:
        tab = Tab(ours_write, ours_read)
        yield tab
        tab._session = None
        tab.send("Browser.close")
    finally:
        os.close(ours_write)  # ends it too
        os.close(ours_read)
        os.waitpid(process, 0)


def _high(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved
