"""A stand-in for the all-in-one image's server: the documented routes and shapes, the one shell, and its faults.

Commands really run, as this user, each session in a bash of its own. What lies at ``/mnt/user-data`` and the temporary
files of sandfleet are kept in a directory of the test's. As with the real one, two commands that meet in a session are
answered with its complaint about an ``ErrorObservation``, and nobody knows what they did.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

BROKEN = "'ErrorObservation' object has no attribute 'exit_code'"
Answer = tuple[int, Any]
Fault = Callable[["_Handler"], None]


class _Session:
    """One persistent bash."""

    def __init__(self, name: str, cwd: Path) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, line: str) -> tuple[str, int | None]:
        """(output, exit code); no code when the shell ended over it."""
        mark = secrets.token_hex(8)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        quoted = "'" + line.replace("'", "'\\''") + "'"
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"eval {quoted} </dev/null; echo {mark} $?\n".encode())
            self.process.stdin.flush()
        seen = b""
        while (found := re.search(rf"{mark} (\d+)\n".encode(), seen)) is None:
            piece = self.process.stdout.read1(65536)
            if not piece:
                return seen.decode("utf-8", "replace"), self.process.wait(5)
            seen += piece
        return seen[: found.start()].decode("utf-8", "replace"), int(found[1])

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(5)
        with self.lock:  # whoever reads sees the end
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()


class StandIn:
    """The server.

    Attributes:
        lines: Command lines that ran, in the order of their beginning.
        made: Sessions that were created.
        closed: Sessions that were closed.
        faults: What happens instead at a route, once each.
        lies: JSON that a route answers, every time.
        missing: Routes that it does not have.
        asked: How often each route was asked.
        chunked: Whether its answers come in chunks.
        hostname: What it says its host is called.
    """

    def __init__(self, root: Path, *, bash: bool) -> None:
        self.root = root
        self.bash = bash
        self.hostname = secrets.token_hex(8)
        self.lines: list[str] = []
        self.made: list[str] = []
        self.closed: list[str] = []
        self.faults: dict[str, Fault] = {}
        self.lies: dict[str, Any] = {}
        self.missing: set[str] = set()
        self.asked = Counter[str]()
        self.chunked = False
        self.most_at_once = 0
        self._at_once = 0
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()
        for name in ("user-data/workspace", "user-data/uploads", "user-data/outputs", "tmp"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = False  # closing waits for them, so that none is left
        self._server.stand_in = self  # type: ignore[attr-defined]
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        for session in list(self._sessions.values()):
            session.end()
        self._server.server_close()
        self._thread.join(5)

    def here(self, text: str) -> str:
        """Paths of the image as paths of the test's directory."""
        text = text.replace("/tmp/.sandfleet", f"{self.root}/tmp/.sandfleet")
        return text.replace("/mnt/user-data", f"{self.root}/user-data")

    def there(self, text: str) -> str:
        """And back."""
        return text.replace(f"{self.root}/user-data", "/mnt/user-data")

    # --- routes --------------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> Answer | bytes:
        self.asked[path] += 1
        if path in self.lies:
            return 200, self.lies[path]
        if path in self.missing:
            return 404, {"detail": "Not Found"}
        for pattern, route in self._routes().items():
            found = re.fullmatch(pattern, f"{method} {path}")
            if found is not None:
                return route(*found.groups(), **(query or body))
        return 404, {"detail": "Not Found"}

    def _routes(self) -> dict[str, Callable[..., Answer | bytes]]:
        routes: dict[str, Callable[..., Answer | bytes]] = {
            "GET /v1/sandbox": self._context,
            "POST /v1/shell/exec": self._shell_exec,
            "POST /v1/shell/kill": self._shell_kill,
            "POST /v1/shell/sessions/create": self._shell_create,
            "DELETE /v1/shell/sessions/([^/]+)": self._close,
            "POST /v1/file/read": self._read,
            "POST /v1/file/write": self._write,
            "POST /v1/file/grep": self._grep,
            "GET /v1/file/download": self._download,
        }
        if self.bash:
            routes |= {
                "POST /v1/bash/exec": self._bash_exec,
                "POST /v1/bash/kill": lambda session_id, signal="SIGTERM": self._kill(session_id),
                "POST /v1/bash/sessions/create": lambda session_id, exec_dir="": self._create(session_id),
                "POST /v1/bash/sessions/([^/]+)/close": self._close,
            }
        return routes

    def _context(self) -> Answer:
        detail = {"system": {}, "runtime": {"python": [], "nodejs": []}, "utils": []}
        return 200, {"success": True, "home_dir": "/home/gem", "version": "1.0.0.150", "detail": detail}

    def _create(self, name: str) -> Answer:
        self.made.append(name)
        with self._lock:
            if name not in self._sessions:
                self._sessions[name] = _Session(name, self.root / "user-data/workspace")
        return _ok({"session_id": name, "status": "ready", "working_dir": "/mnt/user-data/workspace"})

    def _close(self, name: str) -> Answer:
        self.closed.append(name)
        with self._lock:
            session = self._sessions.pop(name, None)
        if session is None:
            return 404, {"success": False, "message": f"Session not found: {name}", "data": None}
        session.end()
        return _ok(None)

    def _kill(self, name: str) -> Answer:
        with self._lock:
            session = self._sessions.pop(name, None)
        if session is not None:
            session.end()
        return _ok({"status": "terminated"})

    def _run(self, name: str, command: str) -> tuple[str, int | None] | Answer:
        """(output, exit code), or the answer where there is no such session, or somebody is in it."""
        with self._lock:
            session = self._sessions.get(name)
        if session is None:
            return 404, {"success": False, "message": f"Session not found: {name}", "data": None}
        if not session.lock.acquire(blocking=False):
            self.lines.append(command)
            return BROKEN, None
        try:
            self.lines.append(command)
            with self._lock:
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
            output, code = session.run(self.here(command))
            return self.there(output), code
        finally:
            with self._lock:
                self._at_once -= 1
            session.lock.release()

    def _shell_create(self, **fields: Any) -> Answer:
        return self._create(fields["id"])

    def _shell_kill(self, **fields: Any) -> Answer:
        return self._kill(fields["id"])

    def _shell_exec(self, command: str, **fields: Any) -> Answer:
        name = fields["id"]
        ran = self._run(name, command)
        if isinstance(ran[1], dict):
            return ran  # type: ignore[return-value]
        output, code = ran
        status = "completed" if name in self._sessions else "terminated"
        return _ok({"session_id": name, "command": command, "status": status, "output": output, "exit_code": code})

    def _bash_exec(self, session_id: str, command: str, **_more: Any) -> Answer:
        ran = self._run(session_id, command)
        if isinstance(ran[1], dict):
            return ran  # type: ignore[return-value]
        output, code = ran
        status = "completed" if session_id in self._sessions else "killed"
        said = {"stdout": output, "stderr": "", "offset": len(str(output).encode()), "stderr_offset": 0}
        data = {"session_id": session_id, "command_id": "c1", "command": command, "status": status, "exit_code": code}
        return _ok({**data, **said})

    def _read(self, file: str, **_more: Any) -> Answer:
        if file == "/etc/hostname":
            return _ok({"file": file, "content": self.hostname + "\n"})
        try:
            return _ok({"file": file, "content": Path(self.here(file)).read_text()})
        except OSError as exc:
            return 404, {"success": False, "message": f"Failed to read file: {exc.strerror}", "data": None}

    def _write(self, file: str, content: str, encoding: str = "utf-8", append: bool = False, **_more: Any) -> Answer:
        raw = base64.b64decode(content) if encoding == "base64" else content.encode()
        if b"/mnt/user-data" in raw or b"/tmp/.sandfleet" in raw:  # a script of commands
            raw = self.here(raw.decode()).encode()
        with Path(self.here(file)).open("ab" if append else "wb") as target:
            target.write(raw)
        return _ok({"file": file, "bytes_written": len(raw)})

    def _grep(self, path: str, pattern: str, **_more: Any) -> Answer:
        matches = [
            {"file": self.there(str(file)), "line_number": number, "line_content": line}
            for file in sorted(Path(self.here(path)).rglob("*"))
            if file.is_file() and b"\0" not in file.read_bytes()
            for number, line in enumerate(file.read_text().splitlines(), 1)
            if re.search(pattern, line, re.IGNORECASE)
        ]
        return _ok({"path": path, "pattern": pattern, "matches": matches, "match_count": len(matches)})

    def _download(self, path: str) -> Answer | bytes:
        return Path(self.here(path)).read_bytes()


def _ok(data: Any) -> Answer:
    return 200, {"success": True, "message": "ok", "data": data}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def _handle(self) -> None:
        stand_in: StandIn = self.server.stand_in  # type: ignore[attr-defined]
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        target = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(target.query).items()}
        fault = stand_in.faults.pop(target.path, None)
        if fault is not None:
            stand_in.lines.append(f"fault at {target.path}")
            self.close_connection = True
            with suppress(OSError):
                fault(self)
            return
        answer = stand_in.answer(self.command, target.path, query, json.loads(raw) if raw else {})
        if isinstance(answer, bytes):
            self.reply(200, answer, "application/octet-stream")
        else:
            self.reply(answer[0], json.dumps(answer[1]).encode())

    def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if self.server.stand_in.chunked:  # type: ignore[attr-defined]
            self.send_header("Transfer-Encoding", "chunked")
            pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
            body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def stand_in(root: Path, *, bash: bool) -> Iterator[StandIn]:
    """A running stand-in, with (``bash``) or without the routes of images since 1.9.3."""
    server = StandIn(root, bash=bash)
    try:
        yield server
    finally:
        server.close()
