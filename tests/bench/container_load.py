"""Many containers under many clients: every result is checked, and afterwards nothing may be left of them."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from sandfleet import Sandbox, SandboxProvider
from sandfleet.stack import Stack
from tests.bench.engine import labelled
from tests.bench.measure import cgroup_mib, memory_mib
from tests.services import wait_until

__all__ = ["load"]

WORKSPACE = "/mnt/user-data/workspace"
_NODE = "load"
_SPARE = 2
_START_S = 300.0
_SETTLE_S = 30.0


class Wrong(Exception):
    """A result that is not what it should be."""


def _same(found: object, wanted: object) -> None:
    if found != wanted:
        raise Wrong(f"{str(found)[:200]!r} where {str(wanted)[:200]!r} should be")


class Client:
    """One thread's share of the load: its own files in every sandbox, and what must be in them."""

    def __init__(self, number: int, sandboxes: list[Sandbox]) -> None:
        self._sandboxes = sandboxes
        self._random = random.Random(number)
        self._mine = f"client-{number}"
        self._files: dict[tuple[str, str], str] = {}
        self.done = self.lost = self.wrong = 0
        self.told: list[str] = []
        self._kinds: list[Callable[[Sandbox], None]] = [
            self._run, self._run, self._pipe, self._write, self._write, self._read, self._read, self._append,
            self._search, self._list, self._remove, self._large,
        ]  # fmt: skip

    def until(self, end: float) -> None:
        """One operation after the other, until that time."""
        while time.monotonic() < end:
            kind = self._random.choice(self._kinds)
            try:
                kind(self._random.choice(self._sandboxes))
            except Wrong as exc:
                self.wrong += 1
                self.told.append(f"{kind.__name__}: {exc}")
            except Exception as exc:  # noqa: BLE001  (whatever it was, this operation gave no result)
                self.lost += 1
                self.told.append(f"{kind.__name__}: {exc!r}")
            self.done += 1

    def _token(self) -> str:
        return f"{self._mine}-{self._random.getrandbits(64):x}"

    def _path(self, sandbox: Sandbox) -> tuple[tuple[str, str], str]:
        name = f"{self._mine}-{self._random.randrange(4)}.txt"
        return (sandbox.id, name), f"{WORKSPACE}/{name}"

    def _run(self, sandbox: Sandbox) -> None:
        token = self._token()
        result = sandbox.run(f"echo {token}; echo {token}-err >&2; exit 3")
        _same((result.stdout, result.stderr, result.exit_code), (f"{token}\n", f"{token}-err\n", 3))

    def _pipe(self, sandbox: Sandbox) -> None:
        text = self._token() * 100
        _same(sandbox.run("cat", stdin=text).check().stdout, text)

    def _write(self, sandbox: Sandbox) -> None:
        key, path = self._path(sandbox)
        content = f"{self._token()}\n" * self._random.choice([1, 10, 1000])
        self._files.pop(key, None)  # until it is answered nobody knows what is there
        sandbox.write_file(path, content)
        self._files[key] = content

    def _append(self, sandbox: Sandbox) -> None:
        key, path = self._path(sandbox)
        if (before := self._files.pop(key, None)) is not None:
            line = f"{self._token()}\n"
            sandbox.write_file(path, line, append=True)
            self._files[key] = before + line

    def _read(self, sandbox: Sandbox) -> None:
        key, path = self._path(sandbox)
        if (wanted := self._files.get(key)) is not None:
            _same(sandbox.read_file(path), wanted)

    def _search(self, sandbox: Sandbox) -> None:
        key, path = self._path(sandbox)
        if (wanted := self._files.get(key)) is not None:
            matches, _ = sandbox.grep(path, wanted.split("\n", 1)[0], literal=True)
            _same((matches[0].path, matches[0].line_number), (path, 1))

    def _list(self, sandbox: Sandbox) -> None:
        listed, _ = sandbox.glob(WORKSPACE, f"{self._mine}-*.txt")
        known = {f"{WORKSPACE}/{name}" for sandbox_id, name in self._files if sandbox_id == sandbox.id}
        _same(known - set(listed), set())

    def _remove(self, sandbox: Sandbox) -> None:
        key, path = self._path(sandbox)
        if self._files.pop(key, None) is not None:
            sandbox.remove(path)
            _same(sandbox.exists(path), False)

    def _large(self, sandbox: Sandbox) -> None:
        path = f"{WORKSPACE}/{self._mine}.bin"
        content = self._random.randbytes(1024 * 1024)
        sandbox.update_file(path, content)
        _same(sandbox.download_file(path), content)


def load(tmp: Path, *, containers: int = 40, clients: int = 8, seconds: float = 60.0) -> dict[str, float]:
    """Mixed operations on many containers of one node; what was lost, wrong or left behind."""
    state = tmp / "load"
    with (
        Stack(
            [_NODE], backend="docker", state_dir=state, replicas=containers + _SPARE, blank_pool=_SPARE, reserve_free=0
        ) as stack,
        SandboxProvider(stack.settings) as provider,
    ):
        node = psutil.Process(stack.nodes[_NODE].pid)
        # Pools of connections and threads grow with the first load and stay.
        _mixed(_all_at_once(provider, [f"warm-up-{number}" for number in range(containers)]), clients, seconds / 6)
        _end_all(stack, provider)
        before = _held(node)
        sandboxes = _all_at_once(provider, [f"load-{number}" for number in range(containers)])
        found = _idle(stack, containers)
        runners = _mixed(sandboxes, clients, seconds)
        for line in [line for runner in runners for line in runner.told][:20]:
            print(f"load: {line}")
        missing = containers - sum(
            info.thread_id in {f"load-{n}" for n in range(containers)} for info in provider.list()
        )
        _end_all(stack, provider)
        left = _left_running(stack, node, before)
        stack.stop_node(_NODE, grace_s=60.0)
        left += _left_behind(stack)
    operations = sum(runner.done for runner in runners)
    return found | {
        "load_operations": operations,
        "load_ops_per_s": operations / seconds,
        "load_lost": sum(runner.lost for runner in runners) + missing,
        "load_wrong": sum(runner.wrong for runner in runners),
        "load_leaked": left,
    }


def _mixed(sandboxes: list[Sandbox], clients: int, seconds: float) -> list[Client]:
    """Clients that did mixed operations for so long, each on a thread of its own."""
    runners = [Client(number, sandboxes) for number in range(clients)]
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=runner.until, args=(end,)) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return runners


def _all_at_once(provider: SandboxProvider, thread_ids: list[str]) -> list[Sandbox]:
    with ThreadPoolExecutor(8) as pool:
        handles = [
            provider.get(each) for each in pool.map(lambda t: provider.acquire(t, timeout_s=_START_S), thread_ids)
        ]
    return [handle for handle in handles if handle is not None]


def _end_all(stack: Stack, provider: SandboxProvider) -> None:
    """End every thread's sandbox; the node has its blank ones then, and nothing else."""
    for info in provider.list():
        provider.destroy(info.sandbox_id)
    wait_until(lambda: sum(sum(view.blanks.values()) for view in stack.store.nodes()) == _SPARE, _START_S)
    wait_until(lambda: len(labelled(stack.settings)) == _SPARE, _SETTLE_S)


def _idle(stack: Stack, containers: int) -> dict[str, float]:
    """What the containers cost that do nothing."""
    wait_until(lambda: len(labelled(stack.settings)) == containers + _SPARE, _SETTLE_S)
    pids = [pid for pid in labelled(stack.settings).values() if pid]
    memory = [memory_mib(pid) for pid in pids]
    return {
        "idle_containers": len(pids),
        "idle_pss_mib": statistics.mean(each.pss for each in memory),
        "idle_rss_mib": statistics.mean(each.rss for each in memory),
        "idle_cgroup_mib": statistics.mean(cgroup_mib(pid) for pid in pids),
    }


def _held(node: psutil.Process) -> tuple[int, int]:
    """Descriptors and processes of a node; connections to Redis (all its TCP) count from one per thread on, a pool."""
    pool = sum(each.status == psutil.CONN_ESTABLISHED for each in node.net_connections(kind="tcp"))
    return node.num_fds() - min(pool, node.num_threads()), len(node.children(recursive=True))


def _left_running(stack: Stack, node: psutil.Process, before: tuple[int, int]) -> int:
    """What the node and the engine hold beyond what they held before."""

    def excess() -> int:
        return sum(max(0, now - then) for now, then in zip(_held(node), before, strict=True))

    until = time.monotonic() + _SETTLE_S
    while excess() and time.monotonic() < until:
        time.sleep(0.2)
    if excess():
        print(f"load: fds and processes {before} before, {_held(node)} after")
    return excess() + len(labelled(stack.settings)) - _SPARE


def _left_behind(stack: Stack) -> int:
    """Containers, slots, run directories and journal entries of a node that has ended."""
    settings = stack.settings
    own = settings.data_root / "nodes" / _NODE
    files = [*settings.run_root.glob("*/*"), *own.glob("slots/*"), *own.glob("sandboxes/*")]
    if files:
        print(f"load: left behind: {[str(path) for path in files[:20]]}")
    return len(labelled(settings)) + len(files)
