"""Containers, images, disks and journals in trouble: a typed answer, the right state, nothing left behind (issue 5)."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandfleet import Sandbox, SandboxProvider
from sandfleet.errors import (
    NoCapacity,
    NoSpace,
    OutcomeUnknown,
    ReadOnly,
    ResourceLimitExceeded,
    SandboxLost,
    SandfleetError,
)
from sandfleet.stack import Stack
from sandfleet.testing.backend_world import wait_for
from tests.services import SANDBOX_IMAGE, require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(240)]

LEASE_S = 3.0
#: A node that is started again takes over from its earlier run while that one's lease lasts, however slow the machine.
LONG_LEASE_S = 20.0
DEPLOYMENTS: dict[int, str] = {}


def docker(*args: str) -> str:
    done = subprocess.run(["docker", *args], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def containers(stack: Stack) -> list[str]:
    """Names of the fleet's containers, running or not."""
    label = f"label=sandfleet.deployment={DEPLOYMENTS[id(stack)]}"
    return docker("ps", "-a", "--format", "{{.Names}}", "--filter", label).split()


def container_of(stack: Stack, sandbox_id: str) -> str:
    """The container of a sandbox, by the journal of its node."""
    for path in (stack.settings.data_root / "nodes").glob("*/sandboxes/*.json"):
        entry = json.loads(path.read_text())
        if entry.get("sandbox_id") == sandbox_id and "ticket" in entry:
            return str(entry["ticket"]["container"])
    raise AssertionError(f"no journal entry names {sandbox_id}")


@contextmanager
def fleet(**settings: Any) -> Iterator[Stack]:
    """One node; whatever happened to it, when it has stopped there is no container of it and nothing in its journal."""
    require("docker")
    require("redis")
    given = {"lease_s": LEASE_S, "replicas": 4, "acquire_timeout_s": 60.0, "blank_pool": 0, **settings}
    with Stack(1, backend="docker", **given) as stack:
        DEPLOYMENTS[id(stack)] = (stack.settings.data_root / "data-id").read_text().strip()
        yield stack
        for node_id in stack.node_ids:
            stack.stop_node(node_id)
        assert containers(stack) == []
        nodes = stack.settings.data_root / "nodes"
        try:
            (nodes / "written").touch()
        except OSError:
            return  # nothing can be removed from a disk that became read-only
        assert [path for path in nodes.glob("*/sandboxes/*") if path.suffix != ".bad"] == []
        assert list(nodes.glob("*/slots/*")) == []


def sandbox_of(provider: SandboxProvider, thread_id: str) -> Sandbox:
    sandbox = provider.get(provider.acquire(thread_id))
    assert sandbox is not None
    return sandbox


class Call:
    """Something that is done on another thread; `answer` is what came of it."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self._answers: list[Any] = []
        self._do = do
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._answers.append(self._do())
        except BaseException as exc:  # noqa: BLE001  (the test judges it)
            self._answers.append(exc)

    def answer(self, within_s: float = 30.0) -> Any:
        wait_until(lambda: self._answers, within_s)
        return self._answers[0]


# --- containers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [("kill",), ("rm", "-f"), ("restart", "-t", "0")])
def test_a_container_ended_from_outside_is_told_at_once_and_its_thread_goes_on(how: tuple[str, ...]) -> None:
    with fleet() as stack, SandboxProvider(stack.settings) as provider:
        sandbox = sandbox_of(provider, "mine")
        sandbox.write_file("kept", "mine")
        call = Call(lambda: sandbox.run("touch begun; sleep 100"))
        wait_until(lambda: sandbox.exists("begun"), 20)
        docker(*how, container_of(stack, sandbox.id))
        answer = call.answer(10)
        assert isinstance(answer, (OutcomeUnknown, SandboxLost)), answer
        wait_until(lambda: [i.state for i in provider.list() if i.sandbox_id == sandbox.id] != ["live"], 10)
        with pytest.raises(SandboxLost):
            sandbox.run("true")
        again = sandbox_of(provider, "mine")
        assert again.read_file("kept") == "mine"
        wait_until(lambda: len(containers(stack)) == 1, 30)


def test_a_command_out_of_memory_ends_alone_and_a_sandbox_out_of_memory_ends_as_such() -> None:
    with fleet(memory_bytes=96 << 20, tmp_bytes=512 << 20) as stack, SandboxProvider(stack.settings) as provider:
        sandbox = sandbox_of(provider, "hungry")
        done = sandbox.run("python3 -c 'x = bytearray(1 << 30); print(sum(x[::4096]))'")
        with pytest.raises(ResourceLimitExceeded):
            done.check()
        assert sandbox.run("echo on").stdout == "on\n"
        # What lies in /tmp is memory that no process gives back when it ends: at last sandboxd itself has to go.
        with pytest.raises((OutcomeUnknown, SandboxLost)):
            sandbox.run("cat /dev/zero > /tmp/full; sleep 1; cat /dev/zero > /tmp/more")
        wait_until(lambda: 'reason="out of memory"' in stack.log("node-1").read_text(), 20)
        with pytest.raises(SandboxLost):
            sandbox.run("true")
        again = sandbox_of(provider, "hungry")
        assert again.run("echo on").stdout == "on\n"
        wait_until(lambda: len(containers(stack)) == 1, 30)


# --- images --------------------------------------------------------------------------------------


@pytest.fixture
def own_image() -> Iterator[str]:
    require("docker")
    image = f"sandfleet/test-trouble-{os.getpid()}:1"
    docker("tag", SANDBOX_IMAGE, image)
    yield image
    subprocess.run(["docker", "rmi", "-f", image], capture_output=True, check=False)


def test_an_image_removed_under_running_sandboxes_stops_new_ones_only(own_image: str) -> None:
    env = {"SANDFLEET_IMAGE": own_image, "SANDFLEET_IMAGE_PULL_POLICY": "Never"}
    with fleet(env=env, blank_pool=1, reserve_free=0) as stack, SandboxProvider(stack.settings) as provider:
        sandbox = sandbox_of(provider, "old")
        sandbox.write_file("kept", "mine")
        provider.release(sandbox.id)
        wait_until(lambda: sum(sum(view.blanks.values()) for view in stack.store.nodes()) == 1, 60)
        docker("rmi", "-f", own_image)
        warm = sandbox_of(provider, "old")
        assert warm.id == sandbox.id
        assert warm.read_file("kept") == "mine", "what runs needs no image"
        failures: list[SandfleetError] = []
        # For some seconds the image is known by its id, which the engine keeps for those that run.
        wait_until(lambda: _fails(provider, failures), 60)
        assert (failures[0].code, failures[0].facts.get("reason")) in {
            ("start_failed", "no_image"),
            ("start_failed", "backing_off"),  # the same thing, some tries later
        }
        assert f"docker pull {own_image}" in str(failures[0])
        assert warm.run("echo on").stdout == "on\n"
        docker("tag", SANDBOX_IMAGE, own_image)
        wait_until(lambda: _runs(provider, "new-1"), 60)


def _fails(provider: SandboxProvider, failures: list[SandfleetError]) -> bool:
    try:
        provider.destroy(provider.acquire(f"new-{os.urandom(4).hex()}"))
    except SandfleetError as exc:
        failures.append(exc)
    return bool(failures)


def _runs(provider: SandboxProvider, thread: str) -> bool:
    try:
        return sandbox_of(provider, thread).run("true").exit_code == 0
    except SandfleetError:
        return False


# --- disks ---------------------------------------------------------------------------------------


@contextmanager
def disk_of(directory: Path, mebibytes: int) -> Iterator[Path]:
    """A small ext4 of its own, which becomes read-only at its first error."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts file systems")
    (mounted := directory / "disk").mkdir()
    image = directory / "image"
    with image.open("wb") as file:
        file.truncate(mebibytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    made = subprocess.run(["mount", "-o", "loop,errors=remount-ro", str(image), str(mounted)], check=False)
    if made.returncode != 0:
        pytest.skip("this machine has no loop devices")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)


@contextmanager
def fleet_on_a_disk(directory: Path, mebibytes: int) -> Iterator[tuple[Stack, SandboxProvider]]:
    with ExitStack() as held:
        disk = held.enter_context(disk_of(directory, mebibytes))
        stack = held.enter_context(fleet(data_root=disk, min_free_bytes=1 << 20))
        yield stack, held.enter_context(SandboxProvider(stack.settings))


def test_a_full_disk_refuses_what_needs_room_and_nothing_else(tmp_path: Path) -> None:
    with fleet_on_a_disk(tmp_path, 64) as (stack, provider):
        sandbox = sandbox_of(provider, "fat")
        sandbox.write_file("kept", "mine")
        full = sandbox.run("cat /dev/zero > big")
        assert full.exit_code == 1
        assert "No space left" in full.stderr
        with pytest.raises(NoSpace):
            sandbox.write_file("more", "x" * 100_000)
        assert sandbox.read_file("kept") == "mine", "a write that failed left what was there"
        assert sandbox.run("echo on").stdout == "on\n"
        wait_until(lambda: stack.store.nodes()[0].state == "cordoned", 20)
        with pytest.raises(NoCapacity):
            provider.acquire("another", timeout_s=3.0)
        sandbox.run("rm big").check()
        wait_until(lambda: _runs(provider, "another"), 60)


def test_a_data_root_that_became_read_only_refuses_what_writes_and_nothing_else(tmp_path: Path) -> None:
    with fleet_on_a_disk(tmp_path, 128) as (stack, provider):
        sandbox = sandbox_of(provider, "mine")
        sandbox.write_file("kept", "mine")
        source = subprocess.run(["findmnt", "-no", "SOURCE", str(stack.settings.data_root)], capture_output=True)
        trouble = Path("/sys/fs/ext4") / Path(source.stdout.decode().strip()).name / "trigger_fs_error"
        if not trouble.exists():
            pytest.skip("this kernel's ext4 cannot be told to fail")
        trouble.write_text("1")
        with pytest.raises(ReadOnly):
            sandbox.write_file("more", "x")
        assert sandbox.read_file("kept") == "mine"
        assert sandbox.run("echo on").stdout == "on\n"
        assert sandbox.run("echo x > more").exit_code != 0
        with pytest.raises(SandfleetError) as caught:
            provider.acquire("another", timeout_s=6.0)
        assert caught.value.code in {"no_capacity", "start_failed", "queue_timeout"}, caught.value
        provider.destroy(sandbox.id)
        wait_until(lambda: containers(stack) == [], 30)
        assert provider.list() == []


# --- journals ------------------------------------------------------------------------------------


def test_a_spoiled_journal_costs_the_sandboxes_it_names_and_touches_nobody_elses(tmp_path: Path) -> None:
    """Garbage, half an entry, an entry of another data root's node, and one that names somebody else's container."""
    with ExitStack() as held:
        other, stack = held.enter_context(fleet()), held.enter_context(fleet(replicas=8, lease_s=LONG_LEASE_S))
        theirs, provider = (held.enter_context(SandboxProvider(each.settings)) for each in (other, stack))
        foreign = sandbox_of(theirs, "theirs")
        foreign.run("touch /tmp/here").check()
        names = ["garbage", "half", "foreign", "stolen", "good"]
        boxes = {name: sandbox_of(provider, name) for name in names}
        for name, box in boxes.items():
            box.run(f"echo {name} > who; touch /tmp/here").check()
        journal = stack.settings.data_root / "nodes" / stack.node_ids[0] / "sandboxes"
        files = {json.loads(path.read_text())["sandbox_id"]: path for path in journal.glob("*.json")}
        paths = {name: files[box.id] for name, box in boxes.items()}
        (theirs_at,) = (other.settings.data_root / "nodes").glob("*/sandboxes/*.json")
        stack.kill_node(stack.node_ids[0])
        paths["garbage"].write_bytes(os.urandom(300))
        paths["half"].write_bytes(paths["half"].read_bytes()[:100])
        paths["foreign"].write_text(theirs_at.read_text())
        entry = json.loads(paths["stolen"].read_text())
        entry["ticket"] = json.loads(theirs_at.read_text())["ticket"]
        paths["stolen"].write_text(json.dumps(entry))
        stack.start_node(stack.node_ids[0])
        assert boxes["good"].run("cat who; ls /tmp/here").stdout == "good\n/tmp/here\n", "it was taken back"
        wait_until(lambda: len(containers(stack)) == 1, 60)
        for name in names[:-1]:
            again = sandbox_of(provider, name)
            assert again.run("cat who; ls /tmp/here").stdout == f"{name}\n", "its files, in a new sandbox"
        assert foreign.run("ls /tmp/here").stdout == "/tmp/here\n", "somebody else's was not touched"
        wait_for(lambda: len(containers(stack)) == len(names), "one container each")
