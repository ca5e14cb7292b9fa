"""What a caller may ask of a container, and what a node's operator may promise (catalogue E13, E15)."""

from __future__ import annotations

from typing import Any

import pytest

from sandfleet.config import Settings
from sandfleet.errors import ConfigError, InvalidArgument
from sandfleet_workers.backends.docker.policy import DEFAULT_IMAGE, NodeRules, Policy, check_rules, digest_of, resolve

GIB = 1024**3


def rules(runtimes: tuple[str, ...] = ("runc",), **container: Any) -> NodeRules:
    settings = Settings(container=container)
    return NodeRules(settings.container, "10001:10001", settings.nofile, settings.tmp_bytes, frozenset(runtimes))


def test_a_caller_that_asks_for_nothing_gets_the_nodes_own() -> None:
    policy = resolve(rules(memory_bytes=2 * GIB, cpus=2.0, runtime="runsc", runtimes=("runsc",)), "", {})
    assert policy.image == DEFAULT_IMAGE
    assert (policy.memory_bytes, policy.cpus, policy.runtime) == (2 * GIB, 2.0, "runsc")
    assert (policy.network_mode, policy.preset, policy.cap_add) == ("none", "strict", ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_bytes", GIB // 2),
        ("cpus", 0.5),
        ("pids", 32),
        ("nofile", 1024),
        ("tmp_bytes", 1024**2),
        ("network_mode", "none"),
        ("preset", "strict"),
        ("runtime", "runc"),
    ],
)
def test_less_may_always_be_asked_for(name: str, value: Any) -> None:
    loose = rules(network_mode="full", preset="developer", runtime="runc")
    assert getattr(resolve(loose, "", {name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_bytes", 8 * GIB),
        ("cpus", 64),
        ("pids", 100_000),
        ("nofile", 1_000_000),
        ("tmp_bytes", 64 * GIB),
        ("network_mode", "full"),
        ("preset", "developer"),
        ("runtime", "crun"),
    ],
)
def test_more_may_be_asked_for_where_the_operator_names_it(name: str, value: Any) -> None:
    runtimes = ("runc", "crun")
    with pytest.raises(InvalidArgument, match=f"{name}.*sandbox.allowed_options") as caught:
        resolve(rules(runtimes), "", {name: value})
    assert caught.value.facts["argument"] == name
    allowing = rules(runtimes, allowed_options=(name,))
    assert getattr(resolve(allowing, "", {name: value}), name) == value


@pytest.mark.parametrize(
    "name",
    [
        "privileged", "volumes", "binds", "mounts", "cap_add", "devices", "device_requests", "pid_mode", "ipc_mode",
        "userns_mode", "uts_mode", "labels", "security_opt", "sysctls", "user", "entrypoint", "HostConfig", "image", "",
    ],
)  # fmt: skip
def test_nothing_else_can_be_asked_for(name: str) -> None:
    with pytest.raises(InvalidArgument, match="no option") as caught:
        resolve(rules(allowed_options=("cpus",)), "", {name: True})
    assert caught.value.facts["argument"] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_bytes", "512m"), ("memory_bytes", True), ("memory_bytes", -1), ("memory_bytes", 0),
        ("memory_bytes", 1e9), ("cpus", 0), ("cpus", float("nan")), ("cpus", float("inf")), ("cpus", "1"), ("pids", 0),
        ("pids", None), ("network_mode", "host"), ("network_mode", "container:abc"), ("network_mode", None),
        ("preset", "privileged"), ("runtime", 1), ("runtime", ["runc"]), ("nofile", {}),
    ],
)  # fmt: skip
def test_values_without_sense_are_refused_even_where_all_is_allowed(name: str, value: Any) -> None:
    everything = ("cpus", "memory_bytes", "network_mode", "nofile", "pids", "preset", "runtime", "tmp_bytes")
    with pytest.raises(InvalidArgument) as caught:
        resolve(rules(allowed_options=everything), "", {name: value})
    assert caught.value.facts["argument"] == name


def test_a_runtime_the_engine_lacks_is_refused_whoever_names_it() -> None:
    with pytest.raises(InvalidArgument, match="no runtime 'runsc'; it has runc"):
        resolve(rules(allowed_options=("runtime",)), "", {"runtime": "runsc"})
    with pytest.raises(ConfigError, match=r"sandbox\.runtime 'runsc' is unknown .*never fall back"):
        check_rules(rules(runtime="runsc"))
    check_rules(rules(runtime="runsc", runtimes=("runc", "runsc")))


def test_what_cannot_be_enforced_is_not_promised() -> None:
    with pytest.raises(ConfigError, match="restricted cannot be enforced"):
        check_rules(rules(network_mode="restricted"))
    with pytest.raises(ConfigError, match="blocked_domains cannot be enforced"):
        check_rules(rules(network_mode="full", blocked_domains=("evil.example",)))
    with pytest.raises(InvalidArgument, match="restricted cannot be enforced"):
        resolve(rules(network_mode="full", allowed_options=("network_mode",)), "", {"network_mode": "restricted"})


def test_an_operator_cannot_allow_what_is_no_option() -> None:
    with pytest.raises(ConfigError, match="names privileged, which no caller can be given"):
        check_rules(rules(allowed_options=("cpus", "privileged")))
    check_rules(rules(allowed_options=("cpus",)))


def test_images_are_the_nodes_own_or_on_the_list() -> None:
    listed = rules(image="acme/base:1", allowed_images=("ghcr.io/acme/*", "busybox:1.36"))
    for image in ("acme/base:1", "ghcr.io/acme/agent:2", "ghcr.io/acme/deep/agent@sha256:" + "0" * 64, "busybox:1.36"):
        assert resolve(listed, image, {}).image == image
    for image in ("busybox:latest", "ghcr.io/acme", "ghcr.io/acmes/x", "acme/base", "evil/ghcr.io/acme/x"):
        with pytest.raises(InvalidArgument, match="not allowed on this node"):
            resolve(listed, image, {})
    for image in ("ghcr.io/acme/../evil/x", "ghcr.io/acme/x y", "ghcr.io/acme/x\n", "-v/:/host", "ghcr.io/acme//x"):
        with pytest.raises(InvalidArgument, match="no name of an image"):
            resolve(listed, image, {})


def test_a_node_needs_a_name_of_an_image() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.image .* is no name"):
        check_rules(rules(image="not an image"))


def test_containers_have_equal_digests_exactly_when_they_are_alike() -> None:
    def digest(policy: Policy | None = None, **given: Any) -> str:
        facts: dict[str, Any] = {"env": {}, "mounts": [], "image_id": "sha256:1", "program": "p", **given}
        return digest_of(policy or resolve(rules(), "", {}), **facts)

    same = digest()
    assert len(same) == 32
    # Saying what the node does anyway changes nothing.
    assert digest(resolve(rules(), DEFAULT_IMAGE, {"pids": 256, "network_mode": "none"})) == same
    others = [
        digest(resolve(rules(), "", {"pids": 255})),
        digest(env={"A": "1"}),
        digest(mounts=[("/a", "/b", True)]),
        digest(mounts=[("/a", "/b", False)]),
        digest(image_id="sha256:2"),
        digest(program="q"),
    ]
    assert len({same, *others}) == len(others) + 1
