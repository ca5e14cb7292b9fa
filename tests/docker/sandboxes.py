"""A Docker backend under test, and the engine behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sandfleet.backends import Connection, SandboxBackend
from sandfleet.config import Settings
from sandfleet.testing.backend_world import World
from sandfleet_workers.backends import load_backend

__all__ = ["docker_backend", "docker_settings", "docker_world", "output_of"]


def docker_settings(
    root: Path, *, node_id: str = "n1", container: Mapping[str, Any] | None = None, **given: Any
) -> Settings:
    """Settings of a node whose files lie below ``root``; its image is never pulled."""
    wanted = {"image_pull_policy": "Never", **(container or {})}
    return Settings(data_root=root, run_root=root / "run", node_id=node_id, container=wanted, **given)


def docker_backend(root: Path, on_death: Callable[[str, str], None], **given: Any) -> SandboxBackend:
    """A backend with such settings."""
    return load_backend("docker")(docker_settings(root, **given), on_death)


@contextmanager
def docker_world(root: Path, **given: Any) -> Iterator[World]:
    """A backend to talk to, closed at the end."""
    deaths: list[tuple[str, str]] = []
    backend = docker_backend(root, lambda *death: deaths.append(death), **given)
    try:
        yield World(backend, root, deaths)
    finally:
        backend.close()


def output_of(world: World, connection: Connection, command: str) -> str:
    """Both streams of a command, one after the other."""
    value = world.value(connection, "execute_command", command=command)
    return str(value["stdout"]) + str(value["stderr"])
