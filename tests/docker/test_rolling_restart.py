"""Every node of a fleet is restarted again and again while callers do all that callers do; none of them notices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandfleet import Batch, Sandbox, SandboxProvider
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(500)]

ROUNDS = 3
LEASE_S = 8.0
PLACE = "/mnt/user-data/workspace"


class Load:
    """Callers of every kind, each with a thread of its own; what went wrong for them, and how often they succeeded."""

    def __init__(self, provider: SandboxProvider) -> None:
        self.provider = provider
        self.errors: list[str] = []
        self.done: dict[str, int] = {}
        self._stop = threading.Event()

    def sandbox(self, thread_id: str) -> Sandbox:
        sandbox = self.provider.get(self.provider.acquire(thread_id))
        assert sandbox is not None
        return sandbox

    def caller(self, name: str, once: Callable[[int], None]) -> None:
        """Do it again and again until told to stop."""
        number = 0
        while not self._stop.is_set():
            try:
                once(number)
            except Exception as exc:  # noqa: BLE001  (whatever a caller sees is what this is about)
                self.errors.append(f"{name} {number} at {time.time():.3f}: {exc!r}")
            number += 1
            self.done[name] = number

    def stop(self) -> None:
        self._stop.set()

    # --- what callers do -----------------------------------------------------------------------

    def commands(self, number: int) -> None:
        assert self.sandbox("commands").run(f"echo {number} >> log").exit_code == 0

    def slow_commands(self, number: int) -> None:
        result = self.sandbox("commands").run(f"sleep 3; echo {number}", session="slow")
        assert (result.stdout, result.exit_code) == (f"{number}\n", 0)

    def session(self, number: int) -> None:
        result = self.sandbox("session").run('count=$((${count:--1} + 1)); echo "$count"', session="mine")
        assert result.stdout == f"{number}\n", f"{result.stdout!r}: another session, or it ran twice"

    def files(self, number: int) -> None:
        sandbox, path = self.sandbox("files"), f"{PLACE}/f{number % 7}"
        sandbox.write_file(path, f"{number}\n" * 2000)
        assert sandbox.read_file(path) == f"{number}\n" * 2000
        sandbox.str_replace(path, f"{number}\n", f"{number}!\n", replace_all=True)
        assert sandbox.read_file(path).startswith(f"{number}!\n")
        assert f"{PLACE}/f{number % 7}" in sandbox.list_dir(PLACE)

    def batches(self, number: int) -> None:
        batch = Batch().run(f"echo {number} > batch").run("sleep 0.2").run("cat batch")
        assert [result.stdout for result in self.sandbox("files").batch(batch)] == ["", "", f"{number}\n"]

    def big_files(self, number: int) -> None:
        content = bytes([number % 256]) * 5_000_000
        sandbox, path = self.sandbox("session"), f"{PLACE}/big"
        sandbox.update_file(path, content)
        assert sandbox.download_file(path) == content
        assert sandbox.grep("/usr/lib/python3", "a line that is nowhere")[0] == []

    def snapshots(self, number: int) -> None:
        assert self.provider.snapshot(self.sandbox("commands").id).files >= 0
        time.sleep(0.5)

    def jobs(self, number: int) -> None:
        job = self.sandbox("jobs").run(f"for n in 1 2 3 4; do echo {number}.$n; sleep 0.5; done", background=True)
        seen = b"".join(chunk.data for chunk in job.output() if hasattr(chunk, "data"))
        result = job.wait(60)
        assert result.exit_code == 0
        assert seen.decode() == result.stdout == "".join(f"{number}.{n}\n" for n in (1, 2, 3, 4))

    def returning(self, number: int) -> None:
        self.provider.acquire(("commands", "session", "files", "jobs")[number % 4])
        time.sleep(0.01)

    def newcomers(self, number: int) -> None:
        thread_id = f"new-{number}"
        sandbox = self.sandbox(thread_id)
        assert sandbox.run(f"echo {number} > mine; cat mine").stdout == f"{number}\n"
        self.provider.destroy(sandbox.id)


KINDS = (
    "commands",
    "slow_commands",
    "session",
    "files",
    "jobs",
    "returning",
    "newcomers",
    "batches",
    "big_files",
    "snapshots",
)


def test_a_rolling_restart_of_all_nodes_under_load_is_not_noticed_by_any_caller(tmp_path: Path) -> None:
    require("docker")
    require("redis")
    with (
        Stack(
            2, backend="docker", lease_s=LEASE_S, detach_s=60.0, replicas=4, blank_pool=1, checkpoint_url=str(tmp_path)
        ) as stack,
        SandboxProvider(stack.settings) as provider,
        ThreadPoolExecutor(len(KINDS)) as pool,
    ):
        load = Load(provider)
        working = [pool.submit(load.caller, kind, getattr(load, kind)) for kind in KINDS]
        try:
            wait_until(lambda: len(load.done) == len(KINDS), 120, story=lambda: str(load.errors))
            first = {name: provider.acquire(name) for name in ("commands", "session", "files", "jobs")}
            epochs = {name: stack.store.route(sandbox_id).epoch for name, sandbox_id in first.items()}  # type: ignore[union-attr]
            for _ in range(ROUNDS):
                for node_id in stack.node_ids:
                    counts = dict(load.done)
                    stack.stop_node(node_id)
                    stack.start_node(node_id)
                    wait_until(
                        lambda counts=counts: all(load.done[kind] > counts[kind] for kind in KINDS),  # type: ignore[misc]
                        120,
                        story=lambda: f"{load.done} {load.errors}",
                    )
        finally:
            load.stop()
        for each in working:
            each.result(90)
        assert load.errors == []
        after = {name: stack.store.route(sandbox_id).epoch for name, sandbox_id in first.items()}  # type: ignore[union-attr]
        assert after == epochs, "the same sandboxes as before"
        lines = load.sandbox("commands").run("cat log").stdout.split()
        assert lines == [str(number) for number in range(load.done["commands"])], "each ran once, in order"
