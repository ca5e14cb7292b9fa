"""A fleet that is asked for more than its operator allows: the cases E13 and E15 from a client's end to a container."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from sandfleet import SandboxProvider
from sandfleet.errors import InvalidArgument, Unavailable
from sandfleet.model import NodeState, SandboxSpec
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Stack]:
    require("docker")
    require("redis")
    with Stack(1, backend="docker", replicas=3, blank_pool=0, acquire_timeout_s=30.0) as stack:
        yield stack


def acquired(fleet: Stack, **spec: Any) -> str:
    """The id of a new thread's sandbox of that kind."""
    with SandboxProvider(fleet.settings, spec=SandboxSpec("docker", **spec)) as provider:
        return provider.acquire()


def containers(fleet: Stack) -> list[dict[str, Any]]:
    """What the engine knows of the fleet's containers."""
    data_id = (fleet.settings.data_root / "data-id").read_text().strip()
    argv = ["docker", "ps", "-aq", "--filter", f"label=sandfleet.deployment={data_id}"]
    ids = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    if not ids:
        return []
    found: list[dict[str, Any]] = json.loads(
        subprocess.run(["docker", "inspect", *ids], check=True, capture_output=True).stdout
    )
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("privileged", True), ("volumes", ["/:/host"]), ("labels", {"sandfleet.node": "other"}), ("pid_mode", "host"),
        ("network_mode", "host"), ("network_mode", "full"), ("memory_bytes", 1024**4), ("preset", "developer"),
        ("runtime", "runsc-of-tomorrow"), ("HostConfig", {"Privileged": True}),
    ],
)  # fmt: skip
def test_E13_a_client_that_asks_for_more_is_told_so_and_nothing_is_started(fleet: Stack, name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        acquired(fleet, options={name: value})
    assert refused.value.facts["argument"] == name
    assert containers(fleet) == []
    (node,) = fleet.store.nodes()
    assert (node.places, node.state) == (0, NodeState.READY), "refusing costs no place and speaks for nobody's fault"


def test_E13_nor_another_image(fleet: Stack) -> None:
    with pytest.raises(InvalidArgument, match="not allowed on this node"):
        acquired(fleet, image="evil/image:1")
    assert containers(fleet) == []


def test_E13_what_it_may_ask_for_is_what_it_gets(fleet: Stack) -> None:
    less = {"memory_bytes": 256 * 1024**2, "pids": 64, "cpus": 0.5}
    with SandboxProvider(fleet.settings, spec=SandboxSpec("docker", options=less)) as provider:
        sandbox_id = provider.acquire()
        (container,) = containers(fleet)
        host = container["HostConfig"]
        assert (host["Memory"], host["PidsLimit"], host["NanoCpus"]) == (256 * 1024**2, 64, 500_000_000)
        assert (host["Privileged"], host["NetworkMode"], host["CapDrop"]) == (False, "none", ["ALL"])
        provider.destroy(sandbox_id)
    assert containers(fleet) == []


def test_E15_a_node_whose_engine_lacks_the_runtime_ends_and_says_why() -> None:
    require("docker")
    require("redis")
    fleet = Stack(1, backend="docker", container={"runtime": "runsc-of-tomorrow"})
    try:
        with fleet:  # it holds its lease before it looks at its engine, so it may be seen for a moment
            wait_until(lambda: fleet.crashed(), 20)
            said = fleet.tail("node-1")
            assert [node.alive for node in fleet.store.nodes()] in ([], [False])
    except Unavailable as exc:
        said = str(exc)
    assert "'runsc-of-tomorrow' is unknown to this Docker engine" in said
    assert "Sandboxes never fall back to a weaker one" in said
