"""Headless Chromium over its DevTools protocol: load a page, evaluate scripts, press keys."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 30.0


def find_browser() -> str | None:
    """$BROWSER_BINARY, else the first Chromium on PATH."""
    named = os.environ.get("BROWSER_BINARY")
    return named or next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a headless Chromium.

    Args:
        binary: from find_browser().
        profile: an empty folder for its files.
        width, height: of the window, in CSS pixels.
    """

    def __init__(
        self,
        binary: str,
        profile: Path,
        *,
        width: int = 1280,
        height: int = 800,
        dark: bool = False,
    ) -> None:
        self._next = 0
        self.console: list[str] = []
        """Console output and uncaught errors."""
        self.requested: list[str] = []
        """Every requested address."""
        with contextlib.ExitStack() as undo:
            self._process = undo.enter_context(_running(binary, profile, width, height))
            address = self._page_address(profile / "DevToolsActivePort")
            self._socket = undo.enter_context(connect(address, max_size=None))
            self._undo = undo.pop_all()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.theme(dark=dark)

    def theme(self, *, dark: bool) -> None:
        """What the page is told that its reader prefers."""
        scheme = "dark" if dark else "light"
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=preferred)

    def _page_address(self, port_file: Path) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self._process.poll() is None, "the browser ended at once"
            assert time.monotonic() < deadline, "the browser opened no port"
            time.sleep(0.05)
        port = port_file.read_text().split("\n")[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            targets = json.load(answer)
        return str(next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page"))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; events that come meanwhile are noted."""
        self._next += 1
        self._socket.send(json.dumps({"id": self._next, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if message.get("id") == self._next:
                assert "error" not in message, message["error"]
                return dict(message["result"])
            self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method in ("Runtime.consoleAPICalled", "Log.entryAdded"):
            self.console.append(json.dumps(params)[:2000])

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a page and wait until it has drawn itself."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.resolve().as_uri() + fragment)
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.ask(condition):
            seen = self.ask("document.body ? document.body.innerText.slice(0, 500) : ''")
            assert time.monotonic() < deadline, f"never true: {condition}; {self.console}; {seen}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """One key, as a person would."""
        text = {"text": key} if len(key) == 1 else {}
        code = {"Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Tab": 9}
        extra = {"windowsVirtualKeyCode": code[key]} if key in code else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **extra)

    def screenshot(self, path: Path) -> None:
        """Write what is in the window as PNG."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()


@contextlib.contextmanager
def _running(
    binary: str, profile: Path, width: int, height: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The browser's process, ended with all that it started."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [binary, *options, f"--window-size={width},{height}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # the binary may be a shell script around the real one
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
