"""A real browser for tests: headless Chromium, driven by the DevTools protocol."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

LIMIT_S = 300.0
"""For what a busy machine does late."""


class Tab:
    """One page of a browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._number = connection, 0

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """The result of a DevTools command."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        self._connection.send(json.dumps(request))
        while True:
            answer = json.loads(self._connection.recv(timeout=LIMIT_S))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, script: str) -> Any:
        """What JavaScript gives, as a plain value."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = LIMIT_S) -> Any:
        """Its value, once that is true."""
        end_s = time.monotonic() + timeout_s
        while not (value := self.evaluate(script)):
            text = self.evaluate("document.body && document.body.innerText")
            assert time.monotonic() < end_s, f"never true: {script}; the page says: {text}"
            time.sleep(0.02)
        return value

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState == 'complete' && location.href != 'about:blank'")

    def click(self, selector: str) -> None:
        """Where a person would click, in its middle, once it stands still."""
        middle = (
            f"(e => {{ if (!e) return null; e.scrollIntoView({{block: 'center'}}); "
            "const r = e.getBoundingClientRect(); return {x: r.x + r.width / 2, y: r.y + r.height"
            f" / 2}} }})(document.querySelector({selector!r}))"
        )
        place = None
        while place != (place := self.wait_for(middle)):
            time.sleep(0.05)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def write(self, selector: str, text: str) -> None:
        """Replace what a field holds; a page that still builds itself may take a click away."""
        has_focus = f"document.activeElement == document.querySelector({selector!r})"
        for _ in range(50):
            self.click(selector)
            if self.evaluate(has_focus):
                break
            time.sleep(0.1)
        self.evaluate("document.activeElement.select()")
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A browser with one page, its files in ``folder``."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--no-proxy-server", "--remote-debugging-port=0",
            f"--user-data-dir={folder}", "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = folder / "DevToolsActivePort"
        end_s = time.monotonic() + LIMIT_S
        while not (port.exists() and port.read_text().count("\n")):
            assert time.monotonic() < end_s, "the browser does not start"
            time.sleep(0.1)
        with urlopen(f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json") as answer:
            pages = [page for page in json.load(answer) if page["type"] == "page"]
        with connect(pages[0]["webSocketDebuggerUrl"], max_size=None) as connection:
            yield Tab(connection)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
