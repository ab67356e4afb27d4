"""A headless Chromium for tools: driven over a pipe with the DevTools protocol, so that nothing but Chromium is needed.

The browser has a profile of its own, which is empty and deleted at the end. Knows nothing of what pages mean.
"""

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--remote-debugging-pipe",
)
PATIENCE = 120.0  # seconds for an answer of the browser, and for `until`
FREE_FD = 20  # file descriptors of the pipes start here, away from the numbers that Chromium reads
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowRight": (39, ""), "ArrowDown": (40, "")}


def find_chromium() -> str | None:
    """Return the path of an installed Chromium or Chrome; None without one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """Messages to and from a browser. Answers are matched by number; events go to `events` in order."""

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out = into, out
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._number = 0
        self.events: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises `RuntimeError` with the browser's words."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        waiting = self._answers[self._number] = queue.Queue()
        os.write(self._into, json.dumps(message).encode() + b"\0")
        answer = waiting.get(timeout=PATIENCE)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        rest = b""
        while piece := os.read(self._out, 1 << 20):
            *messages, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, messages):
                if waiting := self._answers.pop(message.get("id", 0), None):
                    waiting.put(message)
                else:
                    self.events.append(message)


@dataclass
class Tab:
    """A page in a browser.

    browser   the browser, which no other tab uses
    session   of the protocol
    """

    browser: Browser
    session: str

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol for this page."""
        return self.browser.call(method, self.session, **params)

    def events(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events of a kind so far."""
        return [event["params"] for event in list(self.browser.events) if event.get("method") == method]

    def look(self, expression: str) -> Any:
        """Return the value of a JavaScript expression. Promises are waited for."""
        given = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in given:
            told = given["exceptionDetails"]
            raise RuntimeError(f"{expression[:200]}: {told.get('exception', {}).get('description', told['text'])}")
        return given["result"].get("value")

    def until(self, expression: str, patience: float = PATIENCE) -> None:
        """Wait until a JavaScript expression is true. Raises `TimeoutError`."""
        ends = time.monotonic() + patience
        while time.monotonic() < ends:
            if self.look(f"Boolean({expression})"):
                return
            time.sleep(0.05)
        raise TimeoutError(f"this did not become true: {expression}")

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and the preferred colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def point(self, element: str, *, click: bool = False) -> None:
        """Move the mouse to an element, a JavaScript expression; and click."""
        name = f"({element})"
        self.until(name)
        box = self.look(
            f"(() => {{ const e = {name}; e.scrollIntoView({{block: 'nearest'}}); const b = e.getClientRects()[0];"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        place = {"x": box[0], "y": box[1]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def click(self, element: str) -> None:
        """Click on an element, a JavaScript expression."""
        self.point(element, click=True)

    def write(self, element: str, text: str) -> None:
        """Put a text into a field, in place of what stands there."""
        self.until(element)
        self.look(f"({element}).focus(), ({element}).select()")
        self.call("Input.insertText", text=text)

    def press(self, *keys: str) -> None:
        """Press keys, one after another."""
        for key in keys:
            code, text = KEYS[key]
            common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
            self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path) -> int:
        """Write a picture of the window, PNG, and return its size in bytes."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)["data"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return len(data)


@contextmanager
def opened_tab(chromium: str, flags: Sequence[str] = FLAGS) -> Iterator[Tab]:
    """Start a browser with one empty page, and end it."""
    inward, outward = os.pipe(), os.pipe()
    reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD, FREE_FD) for fd in (inward[0], outward[1]))

    def move() -> None:
        os.dup2(reads, 3)  # Chromium reads commands there
        os.dup2(writes, 4)  # and writes answers here

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [chromium, *flags, f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=move, **quiet)
        for fd in (inward[0], outward[1], reads, writes):
            os.close(fd)
        try:
            browser = Browser(inward[1], outward[0])
            target = browser.call("Target.createTarget", url="about:blank")["targetId"]
            session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            tab = Tab(browser, session)
            for domain in ("Page", "Runtime", "Network", "Log"):
                tab.call(f"{domain}.enable")
            yield tab
        finally:
            process.kill()
            process.wait()
            os.close(inward[1])
