"""What a fleet tells of itself while it works: Prometheus' metrics, log lines, ``sandfleet top``."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from sandfleet import SandboxProvider
from sandfleet.cli import main
from sandfleet.errors import ConfigError, PathNotFound, Unavailable
from sandfleet.stack import Stack
from tests.services import free_port, require, wait_until

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

SECRET = "hunter2-of-the-test"
_TOP = [sys.executable, "-c", "import sys; from sandfleet.cli import main; sys.exit(main())", "top"]


@pytest.fixture(scope="module")
def measured() -> Iterator[Stack]:
    """Two nodes with mock sandboxes, whose log lines are JSON and whose metrics are on, on any free port."""
    require("redis")
    environ = {"SANDFLEET_LOG_FORMAT": "json"}
    with Stack(
        2, backend="mock", lease_s=3.0, metrics_address="127.0.0.1:0", env=environ, loglevel="DEBUG", replicas=4
    ) as stack:
        yield stack


def scrape(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def samples(address: str) -> dict[str, float]:
    """``name{labels}`` → value."""
    lines = [line for line in scrape(address).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def address_of(stack: Stack, node_id: str) -> str:
    """Where a node said that its metrics are."""

    def told() -> str:
        [view] = [view for view in stack.store.nodes() if view.node_id == node_id]
        return str(view.load.get("metrics", ""))

    return wait_until(told, 5)


def scheduler_address(stack: Stack) -> str:
    return next(line["address"] for line in lines_of(stack, "scheduler") if line["event"] == "metrics.listening")


def lines_of(stack: Stack, name: str) -> list[dict[str, Any]]:
    """The log of a process, which is JSON from the first line to the last."""
    return [json.loads(line) for line in stack.log(name).read_text().splitlines()]


# --- metrics -----------------------------------------------------------------------------------


def test_a_nodes_metrics_tell_what_it_did(measured: Stack) -> None:
    with SandboxProvider(measured.settings) as provider:
        sandbox = provider.get(provider.acquire("measured"))
        assert sandbox is not None
        info = measured.store.sandbox(sandbox.id)
        assert info is not None
        address = address_of(measured, info.node_id)
        before = samples(address)
        for _ in range(5):
            sandbox.run("true")
        with pytest.raises(PathNotFound):
            sandbox.read_file("/mnt/user-data/workspace/none")
        sandbox.write_file("/mnt/user-data/workspace/big", "x" * 1_000_000)
        assert len(sandbox.read_file("/mnt/user-data/workspace/big")) == 1_000_000
        after = samples(address)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown('sandfleet_ops_total{kind="execute_command",outcome="ok"}') == 5
    assert grown('sandfleet_ops_total{kind="read_file",outcome="path_not_found"}') == 1
    assert grown('sandfleet_op_run_seconds_count{kind="execute_command"}') == 5
    assert grown("sandfleet_op_lane_wait_seconds_count") == 8
    assert grown("sandfleet_op_queue_wait_seconds_count") == 8
    assert 0 <= grown("sandfleet_op_queue_wait_seconds_sum") < 5
    assert grown('sandfleet_blob_bytes_total{direction="in"}') == 1_000_000
    assert grown('sandfleet_blob_bytes_total{direction="out"}') >= 1_000_000
    assert after['sandfleet_creates_total{outcome="ok"}'] >= 1
    assert after["sandfleet_acquire_seconds_count"] >= 1, "the request's time did not travel to the node"
    assert 0 < after["sandfleet_acquire_seconds_sum"] < 30
    assert after['sandfleet_sandboxes{backend="mock"}'] >= 1
    assert after["sandfleet_replicas"] == 4
    assert 0 <= after["sandfleet_lease_age_seconds"] < after["sandfleet_lease_seconds"] == 3


def test_a_schedulers_metrics_tell_of_the_fleet_and_of_what_it_decided(measured: Stack) -> None:
    address = scheduler_address(measured)
    before = samples(address)
    with SandboxProvider(measured.settings) as provider:
        for number in range(3):
            provider.acquire(f"placed-{number}")
        told = wait_until(
            lambda: (
                (found := samples(address))["sandfleet_placements_total" + '{outcome="reserved"}']
                >= before.get('sandfleet_placements_total{outcome="reserved"}', 0) + 3
                and _live(found) >= 3
                and found
            ),
            5,
        )
    assert told['sandfleet_nodes{state="ready"}'] == 2
    assert told['sandfleet_queue_depth{queue="sandfleet.scheduler"}'] == 0
    assert 'sandfleet_queue_depth{queue="sandfleet.node.node-1"}' in told
    assert told["sandfleet_line_length"] == 0
    for node_id in ("node-1", "node-2"):
        kept = {
            state: told[f'sandfleet_places{{node="{node_id}",state="{state}"}}']
            for state in ("free", "live", "warm", "creating", "stopping", "burst")
        }
        assert kept.pop("burst") == 0
        assert sum(kept.values()) == told[f'sandfleet_node_replicas{{node="{node_id}"}}'] == 4
    assert told['sandfleet_acquire_requests_total{outcome="placed"}'] >= 3


def _live(found: dict[str, float]) -> float:
    return sum(value for name, value in found.items() if name.startswith("sandfleet_places{") and '"live"' in name)


def test_no_metric_names_a_thread_a_sandbox_or_an_operation(measured: Stack) -> None:
    with SandboxProvider(measured.settings) as provider:
        sandbox = provider.get(provider.acquire("nameless"))
        assert sandbox is not None
        done = sandbox.run(f"echo {SECRET}", env={"KEY": SECRET})
    for address in (scheduler_address(measured), address_of(measured, "node-1"), address_of(measured, "node-2")):
        text = scrape(address)
        for word in ("nameless", sandbox.id, done.op_id, SECRET):
            assert word not in text


def test_health_is_told_and_the_rest_is_not_served(measured: Stack) -> None:
    for address in (scheduler_address(measured), address_of(measured, "node-1")):
        assert scrape(address, "/healthz") == "ok\n"
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(address, "/")
        refused.value.close()
        assert refused.value.code == 404


def test_an_address_that_is_taken_ends_the_node_with_what_to_do(measured: Stack) -> None:
    taken = address_of(measured, "node-1")
    with pytest.raises((Unavailable, ConfigError), match=r"choose another, or port 0"):
        Stack(1, backend="mock", metrics_address=taken, redis_url=measured.settings.redis_url, prefix="other:").start()


@pytest.mark.slow
def test_on_one_machine_every_process_has_a_port_of_its_own() -> None:
    require("redis")
    port = wait_until(_two_free_ports, 10)
    with Stack(1, backend="mock", metrics_address=f"127.0.0.1:{port}") as stack:
        assert "sandfleet_line_length" in scrape(f"127.0.0.1:{port}")
        assert address_of(stack, "node-1") == f"127.0.0.1:{port + 1}"
        stack.kill_redis()
        wait_until(lambda: _status(f"127.0.0.1:{port}", "/metrics") == 503, 10)
        wait_until(lambda: _status(f"127.0.0.1:{port + 1}", "/healthz") == 503, 20)
        assert _status(f"127.0.0.1:{port + 1}", "/metrics") == 200, "what the node counted needs no Redis"


def _two_free_ports() -> int | None:
    """A free port whose neighbour is free too; None: look again."""
    port = free_port()
    with socket.socket() as neighbour:
        try:
            neighbour.bind(("127.0.0.1", port + 1))
        except OSError:
            return None
    return port


def _status(address: str, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=8) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


# --- logs --------------------------------------------------------------------------------------


def test_every_line_about_an_operation_names_it_its_sandbox_and_its_node(measured: Stack) -> None:
    with SandboxProvider(measured.settings) as provider:
        sandbox = provider.get(provider.acquire("logged"))
        assert sandbox is not None
        done = sandbox.run(f"KEY={SECRET} true", env={"TOKEN": SECRET})
        with pytest.raises(PathNotFound):
            sandbox.read_file(f"/mnt/user-data/workspace/{SECRET}")
        info = measured.store.sandbox(sandbox.id)
        assert info is not None

    def told() -> list[dict[str, Any]]:
        about = [line for line in lines_of(measured, info.node_id) if line.get("sandbox_id") == sandbox.id]
        return about if "op.failed" in [line["event"] for line in about] else []

    lines = [line for line in wait_until(told, 5) if line["event"].startswith("op.")]
    for line in lines:
        assert line["op_id"]
        assert (line["node_id"], line["incarnation"]) == (info.node_id, info.incarnation)
    assert [line["event"] for line in lines if line["op_id"] == done.op_id] == ["op.started", "op.finished"]
    [failed] = [line for line in lines if line["event"] == "op.failed"]
    assert (failed["kind"], failed["code"]) == ("read_file", "path_not_found")
    password = measured.settings.redis_url.partition("@")[0].rpartition(":")[2]
    for name in ("scheduler", "node-1", "node-2"):
        text = measured.log(name).read_text()
        assert password not in text
        assert f"KEY={SECRET}" not in text
        assert f'"{SECRET}"' not in text


# --- top ---------------------------------------------------------------------------------------


def test_top_once_is_one_document_with_nodes_operations_and_rates(
    measured: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    with SandboxProvider(measured.settings) as provider, ThreadPoolExecutor(1) as pool:
        sandbox = provider.get(provider.acquire("topped"))
        assert sandbox is not None
        until = time.monotonic() + 3.0

        def work() -> None:
            while time.monotonic() < until:
                sandbox.noop()

        future = pool.submit(work)
        assert main(["--redis-url", measured.settings.redis_url, "top", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        future.result()
    assert {node["node_id"]: node["state"] for node in document["nodes"]} == {"node-1": "ready", "node-2": "ready"}
    assert document["line_length"] == 0
    assert document["totals"]["replicas"] == 8
    assert document["totals"]["ops_per_s"] > 1
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", node["metrics"]) for node in document["nodes"])
    assert main(["--redis-url", measured.settings.redis_url, "top", "--once", "--sort", "load"]) == 0
    out = capsys.readouterr().out
    assert "NODE" in out
    assert "2/2 nodes" in out
    assert "\x1b" not in out


@pytest.fixture
def terminal(measured: Stack, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, list[Any]]]:
    """``sandfleet top`` on a terminal of 80 by 24: its process, our end, and how the terminal was before."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [*_TOP, "--interval", "0.3"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "SANDFLEET_REDIS_URL": measured.settings.redis_url, "TERM": "xterm-256color"},
    )  # fmt: skip
    try:
        yield process, ours, before
        assert termios.tcgetattr(theirs) == before, "the terminal is not as it was"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
        os.close(theirs)


def _read(fd: int, into: bytearray) -> str:
    """What came since, added to what came before."""
    while select.select([fd], [], [], 0)[0]:
        into += os.read(fd, 65536)
    return into.decode("utf-8", "replace")


@pytest.mark.parametrize("leave", ["q", "interrupt", "terminated"])
def test_top_is_drawn_again_and_again_and_leaves_the_terminal_as_it_was(
    measured: Stack, terminal: tuple[subprocess.Popen[bytes], int, list[Any]], leave: str
) -> None:
    process, fd, _ = terminal
    seen = bytearray()
    # The clock in the first line tells one drawing from the next.
    wait_until(lambda: len(set(re.findall(r"sandfleet (\d\d:\d\d:\d\d)", _read(fd, seen)))) >= 2, 15)
    shown = _read(fd, seen)
    assert "\x1b[?1049h" in shown, "it must have a screen of its own"
    assert "node-1" in shown
    assert "node-2" in shown
    lines = re.split(r"\x1b\[H|\r?\n", shown)
    assert max(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) for line in lines) <= 80
    if leave == "q":
        os.write(fd, b"q")
    else:
        process.send_signal(signal.SIGINT if leave == "interrupt" else signal.SIGTERM)
    wait_until(lambda: _read(fd, seen) and process.poll() is not None, 10)
    assert process.returncode == 0
    shown = _read(fd, seen)
    assert shown.rindex("\x1b[?1049l") > shown.rindex("\x1b[?1049h"), "it must give the screen back"
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor must be seen again"
    assert "Traceback" not in shown
