"""A real browser for tests: headless Chromium, driven by its own DevTools protocol over a pipe.

No driver program that must match the browser's version, no port, no download: Debian's Chromium and this file.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.services import dying_with_us, find_chromium_binary, wait_until

_ANSWER_S = 20.0

# The browser reads commands from descriptor 3 and writes to 4.
_WITH_PIPES = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--window-size=1500,900",
]


class Browser:
    """One page. Use it as a context, from one thread.

    Args:
        home: An empty directory: profile and log.
        user, password: What the person types when a site asks (HTTP basic authentication); None types nothing.
    """

    def __init__(self, home: Path, *, user: str | None = None, password: str | None = None) -> None:
        self._home = home
        self._login = None if user is None else (user, password or "")
        self._asked: set[str] = set()
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session = ""
        #: Status of the last document that was loaded.
        self.status = 0

    def __enter__(self) -> Browser:
        self._home.mkdir(parents=True, exist_ok=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = [*_FLAGS, f"--user-data-dir={self._home / 'profile'}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # it refuses to run as root otherwise; it sees our own pages only
        pipes = [sys.executable, "-ISE", "-c", _WITH_PIPES, str(theirs_in), str(theirs_out)]
        command = [*pipes, find_chromium_binary(), *flags]
        with (self._home / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                dying_with_us([*command, "about:blank"]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs_in, theirs_out),
                env={**os.environ, "HOME": str(self._home)},
                start_new_session=True,
            )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime"):
                self._call(f"{domain}.enable")
            self._call("Fetch.enable", handleAuthRequests=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its session, which is nobody else's
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        # Killed, it leaves the directory of its socket, whose path has to be short, in the system's temporary one.
        with contextlib.suppress(OSError):
            shutil.rmtree(Path(os.readlink(self._home / "profile" / "SingletonSocket")).parent)

    # --- what a person does --------------------------------------------------------------------

    def go(self, url: str) -> int:
        """Open a page and wait until it is loaded; its HTTP status."""
        self.status = 0
        self._call("Page.navigate", url=url)
        wait_until(lambda: self.status and self.ask("document.readyState") == "complete", _ANSWER_S, story=self.log)
        return self.status

    def type_into(self, selector: str, text: str) -> None:
        """Replace what is in a field by text, as if it were typed."""
        self.ask(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.select(); }})()")
        self._call("Input.insertText", text=text)
        # Some pages listen for keys only.
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key="Shift", code="ShiftLeft")

    def click(self, selector: str) -> None:
        """Click an element."""
        self.ask(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector: str = "body") -> str:
        """What a person reads there; empty when there is no such element."""
        return str(self.ask(f"(document.querySelector({json.dumps(selector)}) || {{innerText: ''}}).innerText"))

    def screenshot(self, path: Path) -> Path:
        """Keep a picture of the window."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))
        return path

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        told = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in told:
            raise AssertionError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def log(self) -> str:
        """What the browser wrote."""
        return (self._home / "browser.log").read_text(errors="replace")[-2000:]

    # --- the protocol --------------------------------------------------------------------------

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(method, params)
        until = time.monotonic() + _ANSWER_S
        while True:
            message = self._next(until)
            if message.get("id") == number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._heard(message)

    def _send(self, method: str, params: dict[str, Any]) -> int:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return number

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self._in, 1 << 16) if ready else b""
            if not chunk:
                raise AssertionError(f"the browser {'ended' if ready else 'does not answer'}:\n{self.log()}")
            self._buffer += chunk
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message

    def _heard(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Fetch.requestPaused":
                self._send("Fetch.continueRequest", {"requestId": params["requestId"]})
            case "Fetch.authRequired":
                self._send("Fetch.continueWithAuth", {
                    "requestId": params["requestId"], "authChallengeResponse": self._type_password(params["requestId"]),
                })  # fmt: skip
            case "Network.responseReceived" if params["type"] == "Document":
                self.status = int(params["response"]["status"])

    def _type_password(self, request_id: str) -> dict[str, str]:
        """What was given once and asked for again was wrong: then the person gives up."""
        if self._login is None or request_id in self._asked:
            return {"response": "CancelAuth"}
        self._asked.add(request_id)
        return {"response": "ProvideCredentials", "username": self._login[0], "password": self._login[1]}
