"""A real Chromium, driven by its own protocol (CDP) over a pipe: no package, no port.

https://chromedevtools.github.io/devtools-protocol
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT_S = 60.0
KEYS = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}


class Browser:
    """One page of a headless Chromium. `errors` are what its console has complained of."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requested: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, address: str) -> None:
        self._ask("Page.navigate", url=address)

    def size(self, width: int, height: int, is_phone: bool = False) -> None:
        scale = 2 if is_phone else 1
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )

    def dark(self) -> None:
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def value(self, expression: str) -> Any:
        """What the expression of JavaScript comes to, in the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, within_s: float = LIMIT_S) -> Any:
        """The value of the expression, when it is true."""
        wanted = f"""new Promise((done, failed) => {{
            const look = () => {{ let v; try {{ v = ({expression}); }} catch (e) {{ v = null; }} if (v) done(v); }};
            setTimeout(() => failed(new Error("never true")), {within_s * 1e3});
            look(); setInterval(look, 50);
        }})"""
        return self.value(wanted)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def picture(self, path: Path) -> None:
        shot = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + LIMIT_S + 10
        while True:
            answer = self._read(deadline_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._notice(answer)

    def _notice(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])

    def _read(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "Chromium does not answer"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "Chromium has ended"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own; afterwards no process of it is left."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def take_pipes() -> None:
        """Chromium reads from file 3 and writes to file 4."""
        source, sink = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(source, 3)
        os.dup2(sink, 4)

    with tempfile.TemporaryDirectory(prefix="lockstep-chromium-") as profile:
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
                   "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
                   "--hide-scrollbars", f"--user-data-dir={profile}")  # fmt: skip
        process = subprocess.Popen(
            [CHROMIUM, *options, "about:blank"],
            preexec_fn=take_pipes, close_fds=False, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            helpers = psutil.Process(process.pid).children(recursive=True)
            os.close(ours_out)  # which ends it
            os.close(ours_in)
            _end(process, helpers)


def _end(process: "subprocess.Popen[bytes]", helpers: list[psutil.Process]) -> None:
    """Waits until the browser and its helpers are gone; those that stay are killed."""
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(helpers, timeout=5)
    for helper in alive:
        helper.kill()
    psutil.wait_procs(alive, timeout=5)
