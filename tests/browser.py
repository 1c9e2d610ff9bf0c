"""A real Chromium without a window, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S, wait_until

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Delete": 46,
    ",": 188,
    ".": 190,
}
_CODES = {",": "Comma", ".": "Period"}
_ALT, _SHIFT = 1, 8


def chromium() -> str | None:
    """The program, if it is installed."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One page of a browser.

    Attributes:
        troubles: what the page complained about: exceptions, errors, and refusals by its policy.
        requested: the addresses that it asked for.
    """

    def __init__(self, width: int, height: int, *, dark: bool = False) -> None:
        program = chromium()
        assert program is not None
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder.name}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *flags],
            pass_fds=[theirs_in, theirs_out],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read = b""
        self._number = 0
        self._session: str | None = None
        self.troubles: list[str] = []
        self.requested: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a DevTools command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def resize(self, width: int, height: int) -> None:
        """Change the size of the page, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def go(self, url: str) -> None:
        """Open a page, and wait until it is there."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression on the page, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """The value of an expression, once it is true."""

        def shown() -> str:
            return f"{condition}: {self.troubles} {self.run('document.body.innerText.slice(0, 1500)')}"

        def found() -> Any:
            try:
                return self.run(condition)
            except AssertionError as error:
                if "navigated" in str(error):  # the page is being loaded
                    return None
                raise

        return wait_until(found, shown)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, alt: bool = False, shift: bool = False) -> None:
        """Press a key: a letter, or a name such as Enter."""
        code = _CODES.get(key) or (key if key in _KEYS else f"Key{key.upper()}")
        event: dict[str, Any] = {
            "key": key,
            "code": code,
            "windowsVirtualKeyCode": _KEYS.get(key) or ord(key.upper()),
            "modifiers": _ALT * alt + _SHIFT * shift,
        }
        text = "\r" if key == "Enter" else key if len(key) == 1 and not alt else ""
        down = {"type": "keyDown" if text else "rawKeyDown", **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", **event, **down)
        self.call("Input.dispatchKeyEvent", **event, type="keyUp")

    def screenshot(self, path: Path) -> None:
        """Write what the page looks like as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], PATIENCE_S)
            data = os.read(self._in, 1 << 16) if ready else b""
            assert data, "the browser does not answer"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        record: dict[str, Any] = json.loads(message)
        return record

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.troubles.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.troubles.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])


@contextlib.contextmanager
def browsing(width: int = 1200, height: int = 800, *, dark: bool = False) -> Iterator[Browser]:
    """A browser, closed in the end."""
    browser = Browser(width, height, dark=dark)
    try:
        yield browser
    finally:
        browser.close()
