"""Containers: operations, files and new threads against the Docker SDK, a host's subprocess and a Celery round trip."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sandfleet import Sandbox, SandboxProvider
from sandfleet.backends import Connection
from sandfleet.stack import Stack
from sandfleet.testing.backend_world import World
from sandfleet_workers.backends import load_backend
from tests.bench.engine import SdkContainer, sdk_container
from tests.bench.measure import interleaved, memory_mib, p50
from tests.bench.stock import stock_worker
from tests.docker.sandboxes import docker_world
from tests.services import wait_until

__all__ = ["new_threads", "speed"]

MIB = 1024 * 1024
WORKSPACE = "/mnt/user-data/workspace"
_START_S = 120.0
_numbers = itertools.count()


class Direct:
    """A container of the node's backend, driven without node and Celery; what comes back is checked."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plan = world.plan("bench-direct")
        self.connection: Connection = world.backend.create(self.plan)

    def run(self, command: str, output: str = "") -> None:
        """A command and what it must write."""
        value = self.world.value(self.connection, "execute_command", command=command)
        assert (value["stdout"], value["exit_code"]) == (output, 0), (value["stderr"], value["exit_code"])

    def write(self, name: str, content: bytes) -> None:
        """A file."""
        self.world.value(self.connection, "write_file", content, path=f"{WORKSPACE}/{name}")

    def read(self, name: str, content: bytes) -> None:
        """A file, and what must be in it."""
        assert self.world.read(self.connection, f"{WORKSPACE}/{name}") == content


def _host(*argv: str) -> Callable[[], object]:
    return lambda: subprocess.run(argv, check=True, capture_output=True)


def _content() -> bytes:
    """1 MiB of text that was never written before."""
    return os.urandom(MIB // 2).hex().encode()


def speed(tmp: Path, *, blocks: int) -> dict[str, float]:
    """Commands and files of 1 MiB: node-to-container and through Celery, against their yardsticks."""
    with ExitStack() as held:
        world = held.enter_context(docker_world(Path(held.enter_context(_directory(tmp))), node_id="bench-direct"))
        direct = Direct(world)
        pid = world.backend.pid_of(direct.plan.sandbox_id)  # type: ignore[attr-defined]
        time.sleep(1.0)  # it has started, and has done nothing yet
        alone = memory_mib(pid)
        sdk = held.enter_context(sdk_container(world.backend.settings, load_backend("docker").default_image))  # type: ignore[attr-defined]
        stack = held.enter_context(Stack(["bench"], backend="docker", blank_pool=0))
        app = held.enter_context(stock_worker(stack.settings.redis_url, tmp / "stock-containers.log", events=False))
        provider = held.enter_context(SandboxProvider(stack.settings))
        sandbox = _sandbox(provider, "bench")
        found = {"sandboxd_pss_mib": alone.rss, "sandboxd_private_mib": alone.private}
        found.update(_commands(direct, sandbox, sdk, lambda: app.send_task("stock.noop").get(timeout=30), blocks))
        found.update(_files(direct, sandbox, sdk, max(3, blocks // 2)))
        return found


@contextmanager
def _directory(tmp: Path) -> Iterator[str]:
    path = tmp / "direct"
    path.mkdir(mode=0o711)
    tmp.chmod(0o711)
    yield str(path)


def _sandbox(provider: SandboxProvider, thread_id: str) -> Sandbox:
    sandbox = provider.get(provider.acquire(thread_id))
    assert sandbox is not None
    return sandbox


def _commands(
    direct: Direct, sandbox: Sandbox, sdk: SdkContainer, celery_noop: Callable[[], object], blocks: int
) -> dict[str, float]:
    calls: dict[str, Callable[[], object]] = {
        "celery_noop": celery_noop,
        "true": lambda: sandbox.run("true").check(),
        "node_true": lambda: direct.run("true"),
        "host_true": _host("true"),
        "node_shell": lambda: direct.run("true; true"),
        "host_shell": _host("bash", "-c", "true; true"),
        "docker_exec_true": sdk.true,
    }
    samples = interleaved(calls, blocks=blocks, per_block=10, warm_up=10)
    found = {f"{name}_p50_ms": p50(each) for name, each in samples.items()}
    return found | {
        "true_speedup_vs_docker_exec": found["docker_exec_true_p50_ms"] / found["true_p50_ms"],
        "true_vs_celery_noop": found["true_p50_ms"] / found["celery_noop_p50_ms"],
        "true_vs_host_subprocess": found["node_true_p50_ms"] / found["host_true_p50_ms"],
        "shell_vs_host_subprocess": found["node_shell_p50_ms"] / found["host_shell_p50_ms"],
    }


def _files(direct: Direct, sandbox: Sandbox, sdk: SdkContainer, blocks: int) -> dict[str, float]:
    """Reading, writing and printing 1 MiB; of the SDK's two ways the faster one counts."""
    content = _content()
    text = content.decode()
    direct.write("read", content)
    sandbox.update_file(f"{WORKSPACE}/read", content)
    sdk.put("read", content)

    def read() -> None:
        assert sandbox.download_file(f"{WORKSPACE}/read") == content

    def output() -> None:
        assert sandbox.run("cat read").check().stdout == text

    calls: dict[str, Callable[[], object]] = {
        "node_read": lambda: direct.read("read", content),
        "node_write": lambda: direct.write("written", content),
        "node_output": lambda: direct.run("cat read", text),
        "e2e_read": read,
        "e2e_write": lambda: sandbox.update_file(f"{WORKSPACE}/written", content),
        "e2e_output": output,
        "docker_cat": lambda: sdk.cat("read", content),
        "docker_get": lambda: sdk.get("read", content),
        "docker_put": lambda: sdk.put("written", content),
        "docker_pipe": lambda: sdk.pipe("piped", content),
    }
    samples = interleaved(calls, blocks=blocks, per_block=4, warm_up=3)
    times = {name: p50(each) for name, each in samples.items()}
    best = {
        "read": min(times["docker_cat"], times["docker_get"]),
        "write": min(times["docker_put"], times["docker_pipe"]),
        "output": times["docker_cat"],
    }
    found: dict[str, float] = {f"file_1mib_{name}_p50_ms": value for name, value in times.items()}
    for way, figure in (("node", "file_1mib"), ("e2e", "file_1mib_e2e")):
        ratios = {name: best[name] / times[f"{way}_{name}"] for name in best}
        found |= {f"{figure}_{name}_speedup": ratio for name, ratio in ratios.items()}
        found[f"{figure}_speedup_min"] = min(ratios.values())
    return found


def new_threads(tmp: Path, *, rounds: int) -> dict[str, float]:
    """A brand-new thread and its first command, from the blank pool and by a cold start, in turns."""
    with (
        Stack(["blank"], backend="docker", blank_pool=1) as blank_stack,
        Stack(["cold"], backend="docker", blank_pool=0) as cold_stack,
        stock_worker(blank_stack.settings.redis_url, tmp / "stock-new-threads.log", events=False) as app,
        SandboxProvider(blank_stack.settings) as blank,
        SandboxProvider(cold_stack.settings) as cold,
    ):
        samples: dict[str, list[float]] = {"acquire": [], "blank": [], "cold_acquire": [], "cold": [], "noop": []}
        for _ in range(rounds + 1):
            wait_until(lambda: _blanks(blank_stack) == 1, _START_S)
            for _ in range(10):
                samples["noop"].append(_ms(lambda: app.send_task("stock.noop").get(timeout=30)))
            _first_command(blank, samples["acquire"], samples["blank"])
            wait_until(lambda: _blanks(blank_stack) == 1, _START_S)  # it would be made while the other is measured
            _first_command(cold, samples["cold_acquire"], samples["cold"])
        # The first of each pays for imports and connections.
        times = {name: p50(each[10 if name == "noop" else 1 :]) for name, each in samples.items()}
        found: dict[str, Any] = {f"new_thread_{name}_p50_ms": value for name, value in times.items() if name != "noop"}
        return found | {
            "new_thread_speedup_vs_cold": times["cold"] / times["blank"],
            "acquire_blank_vs_celery_noop": times["acquire"] / times["noop"],
        }


def _first_command(provider: SandboxProvider, acquire_ms: list[float], both_ms: list[float]) -> None:
    """Acquire a thread that never was, run a command, end it; the times of the acquire and of both."""
    began = time.perf_counter()
    sandbox_id = provider.acquire(f"new-{next(_numbers)}")
    acquired = time.perf_counter()
    sandbox = provider.get(sandbox_id)
    assert sandbox is not None
    sandbox.run("true").check()
    both_ms.append((time.perf_counter() - began) * 1000)
    acquire_ms.append((acquired - began) * 1000)
    provider.destroy(sandbox_id, delete_data=True)


def _ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def _blanks(stack: Stack) -> int:
    return sum(sum(view.blanks.values()) for view in stack.store.nodes())
