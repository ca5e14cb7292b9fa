"""A Docker engine of a test's own, which can be stopped, killed and started while sandboxes run on it.

It lives in a network namespace of its own: an engine that starts in the host's removes the bridge of the one that is
there already.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from tests.services import SANDBOX_IMAGE, required_services, wait_until

__all__ = ["SecondEngine"]

_STARTED_WITHIN_S = 60.0
_ENDED_WITHIN_S = 60.0


class SecondEngine:
    """An engine without networks, whose only image is the sandboxes'.

    Args:
        root: A short path; the engine's socket, images and containers lie below it.
        live_restore: Whether containers outlive the engine's process.
    """

    def __init__(self, root: Path, *, live_restore: bool) -> None:
        if os.geteuid() != 0 or not shutil.which("dockerd") or not shutil.which("unshare"):
            _give_up("a second Docker engine needs root, dockerd and unshare")
        self.root = root
        self.address = f"unix://{root}/s"
        self._live_restore = live_restore
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it (again) and return when it answers."""
        argv = ["unshare", "--net", "dockerd", "--bridge=none", "--iptables=false", "--ip-masq=false", "--host",
                self.address, "--data-root", f"{self.root}/data", "--exec-root", f"{self.root}/exec", "--pidfile",
                f"{self.root}/pid"]  # fmt: skip
        argv += ["--live-restore"] if self._live_restore else []
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "pid").unlink(missing_ok=True)  # what a killed one left may be anybody's number by now
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._answers, _STARTED_WITHIN_S, story=lambda: (self.root / "log").read_text()[-3000:])

    def load_image(self) -> None:
        """Give it the sandboxes' image."""
        with subprocess.Popen(["docker", "save", SANDBOX_IMAGE], stdout=subprocess.PIPE) as saved:
            self.docker("load", stdin=saved.stdout)

    def docker(self, *args: str, stdin: object = None) -> str:
        """What ``docker`` prints when it talks to this engine."""
        argv = ["docker", "--host", self.address, *args]
        done = subprocess.run(argv, stdin=stdin, capture_output=True, text=True, check=False, timeout=120)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def containers(self) -> list[str]:
        """Names of its containers, running or not."""
        return self.docker("ps", "--all", "--format", "{{.Names}}").split()

    def stop(self) -> None:
        """End it as an upgrade does."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash does; its containers run on."""
        self._end(signal.SIGKILL)

    def remove(self) -> None:
        """End it with all that runs on it, and remove its files and mounts."""
        try:
            if self._process is None:
                self.start()
            if left := self.containers():
                self.docker("rm", "--force", *left)
        finally:
            self.stop()
            mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
            for mount in sorted((m for m in mounts if m.startswith(f"{self.root}/")), reverse=True):
                subprocess.run(["umount", "--lazy", mount], check=False)
            shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> SecondEngine:
        try:
            self.start()
            self.load_image()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.root / "log").read_text()[-3000:]
        argv = ["docker", "--host", self.address, "version"]
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        # `unshare` became dockerd, whose containerd ends with it.
        process.send_signal(number)
        try:
            process.wait(_ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        with contextlib.suppress(OSError, ValueError):
            containerd = int((self.root / "exec" / "containerd" / "containerd.pid").read_text())
            wait_until(lambda: not Path(f"/proc/{containerd}").exists(), 30)


def _give_up(missing: str) -> NoReturn:
    if "docker" in required_services():
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)
