"""Chromium without a window, driven over a pipe: what a page logs, what it requests, and what it shows.

It speaks Chromium's DevTools protocol, JSON messages that end in a zero byte, so that no package is needed for it.
"""

import base64
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

WAIT_S = 60.0
"""For an answer; generous, because the machine may be busy."""


def chromium_path() -> str | None:
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
    )


class Chromium:
    """One browser with a profile of its own, which ends with the block."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--mute-audio",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        # Chromium reads commands from file 3 and writes answers to file 4, whatever those are in this process.
        reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to_browser, from_browser))
        self._process = subprocess.Popen(
            [str(chromium_path()), *flags], pass_fds=(3, 4), preexec_fn=lambda: (os.dup2(reads, 3), os.dup2(writes, 4)),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._count = b"", 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.send("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, AssertionError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: the browser and what it started
            self._process.wait(10)
        finally:
            os.close(self._write)
            os.close(self._read)

    def page(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1, scripts: bool = True
    ) -> "Page":
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.size(width, height, scale)
        page.theme(dark)
        if not scripts:
            page.send("Emulation.setScriptExecutionDisabled", value=True)
        return page

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """A command and its result."""
        self._count += 1
        number, message = self._count, {"id": self._count, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + WAIT_S
        while number not in self._answers:
            self.listen(end)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def listen(self, end: float) -> None:
        """Read what there is, and wait for it until `end`."""
        if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError("Chromium does not answer")
        piece = os.read(self._read, 2**20)
        if not piece:
            raise TimeoutError("Chromium has ended")
        *messages, self._rest = (self._rest + piece).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self._pages:
                self._pages[message["sessionId"]].note(message["method"], message["params"])


class Page:
    """One tab. `errors` and `requests` are complete up to the last command."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.errors: list[str] = []
        """What the console shows as an error or a warning, and exceptions."""
        self.requests: list[str] = []
        self.loaded = False

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(self, url: str) -> None:
        self.loaded = False
        self.send("Page.navigate", url=url)
        end = time.monotonic() + WAIT_S
        while not self.loaded:
            self._browser.listen(end)
        self.requests = [one for one in self.requests if one != "about:blank"]

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """Until the expression is true."""
        end = time.monotonic() + WAIT_S
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.05)
        return value

    def size(self, width: int, height: int, scale: float = 1) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def theme(self, dark: bool) -> None:
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def move(self, x: float, y: float) -> None:
        """The pointer, to a place in the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page, or of what the window shows."""
        answer = self.send(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=whole,
            **({"clip": self._whole()} if whole else {}),
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def _whole(self) -> dict[str, float]:
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def paper(self, path: Path) -> None:
        """A PDF, as printed."""
        answer = self.send("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(answer["data"]))


def luminance(colour: str) -> float:
    """Of a colour as a browser computes it, rgb(…): 0 is black, 1 white."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """As WCAG defines it, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
