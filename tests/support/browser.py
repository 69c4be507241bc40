"""A headless browser, driven through chromedriver by the standard library."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.waiting import PATIENCE

_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-device-scale-factor=1"),
]
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # of the WebDriver standard


def missing() -> str | None:
    """Why there is no browser; None if there is one."""
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(programs)} on PATH" if programs else None


class Browser:
    """One window."""

    def __init__(self, port: int, session: str) -> None:
        self._root = f"http://127.0.0.1:{port}/session/{session}"

    def _call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        return _request(f"{self._root}/{path}", body, method)

    def open(self, url: str) -> None:
        """Go to a page."""
        self._call("url", {"url": url})

    def size(self, width: int, height: int) -> None:
        """Of what the page has, also below what a window may be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.protocol("Emulation.setDeviceMetricsOverride", metrics)

    def dark(self, on: bool) -> None:
        """The reader's dark mode."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.protocol("Emulation.setEmulatedMedia", {"features": [feature]})

    def protocol(self, command: str, params: dict[str, Any]) -> Any:
        """A command of the browser's own protocol."""
        return self._call("goog/cdp/execute", {"cmd": command, "params": params})

    def run(self, script: str, *values: Any) -> Any:
        """What a script returns; ``arguments`` are ``values``."""
        return self._call("execute/sync", {"script": script, "args": list(values)})

    def wait(self, condition: str) -> Any:
        """The value of an expression, once it is true.

        Raises:
            TimeoutError: it stays false.
        """
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if value := self.run(f"return {condition}"):
                return value
            time.sleep(0.02)
        raise TimeoutError(
            f"{condition}; the page has: {self.run('return document.body.innerText')}"
        )

    def element(self, selector: str) -> dict[str, str]:
        """The first element that a CSS selector finds."""
        found: dict[str, str] = self._call("element", {"using": "css selector", "value": selector})
        return found

    def click(self, selector: str) -> None:
        """As a person clicks."""
        self._call(f"element/{self.element(selector)[_ELEMENT]}/click", {})

    def type(self, selector: str, text: str) -> None:
        """As a person types; arrow keys are ``\\ue012`` to ``\\ue015``."""
        self._call(f"element/{self.element(selector)[_ELEMENT]}/value", {"text": text})

    def drag(self, selector: str, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Press the mouse at a point of an element's top left, move it, let it go."""
        box = self.run(
            "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [b.left, b.top]",
            selector,
        )
        points = [(round(box[0] + x), round(box[1] + y)) for x, y in (start, end)]
        moves = [{"type": "pointerMove", "duration": 0, "x": x, "y": y} for x, y in points]
        steps = [moves[0], {"type": "pointerDown", "button": 0}, moves[1]]
        steps.append({"type": "pointerUp", "button": 0})
        mouse = {"type": "pointer", "id": "mouse", "actions": steps}
        self._call("actions", {"actions": [mouse]})

    def hover(self, selector: str, point: tuple[int, int]) -> None:
        """Point at a place from an element's top left."""
        self.run("document.querySelector(arguments[0]).scrollIntoView()", selector)
        box = self.run(
            "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [b.left, b.top]",
            selector,
        )
        x, y = (round(a + b) for a, b in zip(box, point))
        move = {"type": "pointerMove", "duration": 0, "x": x, "y": y}
        self._call("actions", {"actions": [{"type": "pointer", "id": "m", "actions": [move]}]})

    def errors(self) -> list[str]:
        """What scripts have complained of since the last call."""
        return [one["message"] for one in self._call("se/log", {"type": "browser"})]


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium with a new, empty profile."""
    with tempfile.TemporaryDirectory() as profile:
        driver, port = _driver()
        try:
            options = {"args": [*_FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            body = {"capabilities": {"alwaysMatch": wanted}}
            made = _request(f"http://127.0.0.1:{port}/session", body, "POST")
            window = Browser(port, made["sessionId"])
            try:
                yield window
            finally:
                _request(window._root, None, "DELETE")
        finally:
            driver.terminate()
            driver.wait()


def _driver() -> tuple[subprocess.Popen[str], int]:
    """A chromedriver, and its port."""
    output = ""
    for _ in range(5):  # it ends when another process takes the free port first
        driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert driver.stdout is not None
        for line in driver.stdout:
            if "successfully on port" in line:
                return driver, int(line.rstrip(". \n").rsplit(" ", 1)[1])
            output += line
        driver.wait()
    raise RuntimeError(f"chromedriver does not start:\n{output}")


def _request(url: str, body: dict[str, Any] | None, method: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=PATIENCE) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{method} {url}: {error.read().decode()[:2000]}") from None
