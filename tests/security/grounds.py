"""Whole fleets under attack: a secret on the host beside the data root, and threads that would like to have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandfleet import Sandbox, SandboxProvider
from sandfleet.stack import Stack
from tests.docker.images import DEBIAN, require_image
from tests.services import require

__all__ = ["CANARY", "GROUNDS", "WORK", "Ground", "by_exec", "everywhere", "ground", "sandbox_of"]

CANARY = "canary-7f21d9"
WORK = "/mnt/user-data/workspace"
#: The technologies of this suite, for a fixture's ``params``.
GROUNDS = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("local")]

_EXEC = pytest.param("docker-exec", marks=pytest.mark.docker)
#: For a case that needs no Python inside: also where every operation is a ``docker exec``, or there alone.
everywhere = pytest.mark.parametrize("field", [*GROUNDS, _EXEC], indirect=True)
by_exec = pytest.mark.parametrize("field", [_EXEC], indirect=True)


class Ground:
    """One node of one kind, and a client of it.

    Attributes:
        kind: Its backend.
        stack: Its processes.
        provider: Whose threads are attacked, and who attacks.
        secret: A file of the host that everybody there may read and write.
        skills: What sandboxes see at ``/mnt/skills``.
    """

    def __init__(self, kind: str, stack: Stack, provider: SandboxProvider, skills: Path) -> None:
        self.kind, self.stack, self.provider, self.skills = kind, stack, provider, skills
        self.root = stack.settings.data_root
        self.secret = self.root / "secret"
        self.secret.write_text(CANARY)
        self.secret.chmod(0o666)

    def sandbox(self, thread_id: str) -> Sandbox:
        """A thread's sandbox."""
        return sandbox_of(self.provider, thread_id)

    def user_data(self, thread_id: str) -> Path:
        """Where the host keeps a thread's files."""
        return self.root / "threads" / thread_id / "user-data"

    def assert_untouched(self) -> None:
        """The host's secret is what it was, nothing new lies at the data root, and no process of the fleet has died."""
        assert self.secret.read_text() == CANARY
        assert {path.name for path in self.root.iterdir()} <= {"data-id", "nodes", "secret", "threads", "users"}
        assert self.stack.crashed() == {}


def sandbox_of(provider: SandboxProvider, thread_id: str, user_id: str | None = None) -> Sandbox:
    """The sandbox of a thread, acquired."""
    sandbox = provider.get(provider.acquire(thread_id, user_id=user_id))
    assert sandbox is not None
    return sandbox


@contextmanager
def ground(kind: str, root: Path, **given: Any) -> Iterator[Ground]:
    """A fleet of one node with skills; ``given`` are its further settings."""
    require("redis")
    require("bwrap" if kind == "local" else "docker")
    if kind == "docker-exec":
        require_image(DEBIAN)
        given["container"] = {"image": DEBIAN, "image_pull_policy": "Never"}
    skills = root / "skills"
    skills.mkdir()
    (skills / "SKILL.md").write_text("how to\n")
    settings = {"blank_pool": 0, "acquire_timeout_s": 60.0, "skills_path": skills, **given}
    with Stack(1, backend=kind.partition("-")[0], **settings) as stack, SandboxProvider(stack.settings) as provider:
        yield Ground(kind, stack, provider, skills)
