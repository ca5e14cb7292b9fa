"""A container that was started on an empty slot has a thread's data from the claim on."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet_workers.slots import Slots, rename_problem
from tests.services import CHECKOUT, SANDBOX_IMAGE, require

pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),  # the first build on a machine downloads everything
    pytest.mark.skipif(os.geteuid() != 0, reason="gives directories to the sandbox's user: needs root"),
]

UID = 10_001


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    require("docker")
    docker("build", "--quiet", "--tag", SANDBOX_IMAGE, str(CHECKOUT / "images" / "sandbox"), timeout_s=600)


def docker(*argv: str, timeout_s: float = 60) -> str:
    done = subprocess.run(["docker", *argv], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"docker {' '.join(argv)}: {done.stdout}{done.stderr}"
    return done.stdout


class Blank:
    """A container of its own slot, as the Docker backend starts one."""

    def __init__(self, slots: Slots) -> None:
        self.slots, self.slot = slots, secrets.token_hex(8)
        self.name = f"sandfleet-test-slot-{self.slot}"
        self.path = slots.make(self.slot)
        mounts = [f"type=bind,src={self.path}/user-data,dst=/mnt/user-data"]
        mounts += [f"type=bind,src={self.path}/acp-workspace,dst=/mnt/acp-workspace,readonly"]
        strict = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none", "--init"]
        docker(
            "run", "--detach", "--name", self.name, *strict, *(f"--mount={mount}" for mount in mounts),
            SANDBOX_IMAGE, "sleep", "infinity",
        )  # fmt: skip

    def run(self, script: str) -> str:
        return docker("exec", "--workdir=/", self.name, "bash", "-euc", script)

    def remove(self) -> None:
        docker("rm", "--force", "--volumes", self.name)
        self.slots.remove(self.slot)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root that Docker's daemon sees too."""
    path = tmp_path_factory.mktemp("data")
    assert rename_problem(path / "nodes" / "n", path) == ""
    return path


@pytest.fixture
def blanks(root: Path) -> Iterator[list[Blank]]:
    made: list[Blank] = []
    yield made
    for blank in made:
        blank.remove()


@pytest.fixture
def blank(root: Path, blanks: list[Blank]) -> Blank:
    blanks.append(Blank(Slots(root / "nodes" / "n", uid=UID)))
    return blanks[-1]


def test_a_new_threads_writes_land_in_its_directory(root: Path, blank: Blank) -> None:
    thread = root / "threads" / "new"
    blank.slots.claim(blank.slot, thread)
    blank.run("for d in workspace uploads outputs; do echo $d > /mnt/user-data/$d/f; done")
    assert (thread / "user-data/workspace/f").read_text() == "workspace\n"
    assert (thread / "user-data/outputs/f").stat().st_uid == UID


def test_a_returning_thread_is_there_at_once_and_after_a_restart(root: Path, blank: Blank) -> None:
    thread = root / "threads" / "returning"
    for name in ("user-data/workspace/deep/er", "user-data/uploads", "acp-workspace"):
        (thread / name).mkdir(parents=True)
    (thread / "user-data/workspace/deep/er/mine").write_text("data")
    (thread / "acp-workspace/plan").write_text("acp")
    for path in thread.joinpath("user-data").rglob("*"):
        os.chown(path, 1_900_000_001, 1_900_000_001)  # the last time it lived in the backend `local`
    blank.slots.claim(blank.slot, thread)
    look = (
        "cat /mnt/user-data/workspace/deep/er/mine /mnt/acp-workspace/plan; echo more >> /mnt/user-data/workspace/log"
    )
    assert blank.run(look) == "dataacp"
    docker("restart", "--time=0", blank.name)
    assert blank.run(look) == "dataacp"
    assert (thread / "user-data/workspace/log").read_text() == "more\nmore\n"
    assert blank.path.joinpath("user-data").is_symlink()


def test_the_sandboxs_user_cannot_move_or_replace_the_three_directories(root: Path, blank: Blank) -> None:
    thread = root / "threads" / "steadfast"
    blank.slots.claim(blank.slot, thread)
    attacks = [
        "mv /mnt/user-data/workspace /mnt/user-data/w",
        "rmdir /mnt/user-data/uploads",
        "ln -s /etc /mnt/user-data/new",
        "mkdir /mnt/user-data/new",
        "chmod 777 /mnt/user-data",
        "touch /mnt/acp-workspace/new",
    ]
    blank.run("\n".join(f"if {attack} 2>/dev/null; then echo {attack!r} worked >&2; exit 9; fi" for attack in attacks))
    blank.run("touch /mnt/user-data/workspace/mine")
    assert sorted(os.listdir(thread / "user-data")) == ["outputs", "uploads", "workspace"]
    assert sorted(os.listdir(thread / "user-data/workspace")) == ["mine"]
    assert os.listdir(thread / "acp-workspace") == []


def test_a_thread_that_comes_back_moves_from_one_container_to_the_next(root: Path, blanks: list[Blank]) -> None:
    thread, slots = root / "threads" / "wanderer", Slots(root / "nodes" / "n", uid=UID)
    for turn in range(3):
        blanks.append(Blank(slots))
        slots.claim(blanks[-1].slot, thread)
        blanks[-1].run(f"echo {turn} >> /mnt/user-data/workspace/turns")
        docker("kill", blanks[-1].name)
    for blank in blanks:
        blank.remove()
    assert (thread / "user-data/workspace/turns").read_text() == "0\n1\n2\n"
    assert slots.names() == []
    blanks.clear()
