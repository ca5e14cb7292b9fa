"""Attacks on whose a sandbox is (catalogue C6-C8, C17, C20), against whole fleets and against the engine they share."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import docker
import docker.errors
import pytest

from sandfleet import SandboxProvider
from sandfleet.errors import InvalidArgument, SandboxNotFound, StartFailed
from sandfleet.ids import Identity
from sandfleet.stack import Stack
from sandfleet_workers.backends.docker.backend import DockerBackend
from sandfleet_workers.node_identity import data_id
from tests.docker.sandboxes import docker_world
from tests.security.grounds import CANARY, GROUNDS, WORK, Ground, ground, sandbox_of
from tests.services import SANDBOX_IMAGE, require, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=GROUNDS)
def field(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One node that keeps two blank sandboxes, where its kind can, and has few places."""
    with ground(request.param, tmp_path_factory.mktemp(request.param), blank_pool=2, replicas=5) as made:
        yield made


@pytest.fixture
def provider(field: Ground) -> Iterator[SandboxProvider]:
    """A client whose sandboxes end with the test."""
    with SandboxProvider(field.stack.settings) as made:
        yield made
        for info in made.list():
            made.destroy(info.sandbox_id)
    field.assert_untouched()


def blanks_are_ready(field: Ground) -> None:
    """Wait until the pool is as full as it gets."""
    if field.kind == "docker":
        wait_until(lambda: sum(sum(view.blanks.values()) for view in field.stack.store.nodes()) == 2, 60)


# --- C6: names that would like to be paths -------------------------------------------------------

BAD = [
    "../x",
    "a/b",
    "/etc",
    ".",
    "..",
    "",
    "x" * 300,
    "\u0430dmin",
    "a\n",
    "a\0b",
    "a b",
    "$(id)",
    "a:b",
    "a\\b",
    "\u202ea",
    "%2e",
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: ascii(bad[:12]))
def test_C6_an_id_that_is_no_name_is_refused_before_anything_is_made(
    field: Ground, provider: SandboxProvider, bad: str
) -> None:
    before = sorted(path for path in field.root.rglob("*") if "slots" not in path.parts)
    for call in (
        lambda: provider.acquire(bad),
        lambda: provider.acquire("fine", user_id=bad),
        lambda: provider.upload_to_thread(bad, "f", b"x"),
        lambda: provider.list_outputs("fine", user_id=bad),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert provider.list() == []
    assert sorted(path for path in field.root.rglob("*") if "slots" not in path.parts) == before


def test_C6_names_that_differ_by_case_or_begin_with_a_dash_are_threads_of_their_own(
    field: Ground, provider: SandboxProvider
) -> None:
    names = ["Twin", "twin", "-rf", "--help"]
    sandboxes = {name: sandbox_of(provider, name) for name in names}
    for name, sandbox in sandboxes.items():
        sandbox.write_file(f"{WORK}/who", name)
    assert len({sandbox.id for sandbox in sandboxes.values()}) == len(names)
    for name, sandbox in sandboxes.items():
        assert sandbox.run("cat who; ls -A").stdout == f"{name}who\n"
        assert (field.user_data(name) / "workspace" / "who").read_text() == name


# --- C7, C8: identities that collide or read alike -----------------------------------------------


def colliding() -> tuple[str, str]:
    """Two threads whose eight-digit sandbox ids of the seeds are the same: an enemy finds them in no time."""
    seen: dict[str, str] = {}
    for number in itertools.count():
        name = f"thread-{number}"
        first = hashlib.sha256(name.encode()).hexdigest()[:8]
        if first in seen:
            return seen[first], name
        seen[first] = name
    raise AssertionError("unreachable")


def test_C7_threads_whose_short_ids_collide_never_share_a_sandbox(field: Ground, provider: SandboxProvider) -> None:
    victim, enemy = colliding()
    assert Identity(victim).digest[:8] == Identity(enemy).digest[:8]
    theirs = sandbox_of(provider, victim)
    theirs.write_file(f"{WORK}/secret", CANARY)
    with SandboxProvider(field.stack.settings) as other:
        mine = sandbox_of(other, enemy)
        assert mine.id != theirs.id
        assert mine.id.startswith(theirs.id)
        assert mine.run("ls -A").stdout == ""
        # And who claims to be the enemy gets nothing under the victim's id, nor under no id at all.
        for user_id in (None, "somebody"):
            forged = other.get(theirs.id, thread_id=enemy, user_id=user_id)
            assert forged is not None
            for call in (lambda f=forged: f.run("cat secret"), lambda f=forged: f.read_file(f"{WORK}/secret")):  # type: ignore[misc]
                with pytest.raises(SandboxNotFound):
                    call()
        other.destroy(mine.id)
    # With both gone the enemy comes first, and each is who it was.
    provider.destroy(theirs.id)
    taken = sandbox_of(provider, enemy)
    assert taken.id == mine.id
    assert taken.run("ls -A").stdout == ""
    again = sandbox_of(provider, victim)
    assert again.id == theirs.id
    assert again.read_file(f"{WORK}/secret") == CANARY


def test_C8_pairs_of_user_and_thread_that_read_alike_are_different(field: Ground, provider: SandboxProvider) -> None:
    pairs = [("a-b", "c"), ("a", "b-c"), ("a_b", "c"), (None, "c"), (None, "a-b-c")]
    sandboxes = {}
    for user_id, thread_id in pairs:
        sandbox = sandboxes[user_id, thread_id] = sandbox_of(provider, thread_id, user_id)
        sandbox.write_file(f"{WORK}/who", f"{user_id}/{thread_id}")
    assert len({sandbox.id for sandbox in sandboxes.values()}) == len(pairs)
    for (user_id, thread_id), sandbox in sandboxes.items():
        assert sandbox.run("cat who").stdout == f"{user_id}/{thread_id}"
        above = field.root if user_id is None else field.root / "users" / user_id
        assert (above / "threads" / thread_id / "user-data" / "workspace" / "who").is_file()
        other_user = "a" if user_id != "a" else "a-b"
        forged = provider.get(sandbox.id, thread_id=thread_id, user_id=other_user)
        assert forged is not None
        with pytest.raises(SandboxNotFound):
            forged.run("cat who")


# --- C20: what was used stays its thread's -------------------------------------------------------

PLANT = f"""
for d in /tmp /dev/shm /mnt/user-data/workspace /mnt/user-data/uploads /mnt/user-data/outputs ~ /run /var/tmp; do
    echo {CANARY} > $d/.planted 2>/dev/null
done
echo {CANARY} >> ~/.bash_history; echo {CANARY} >> ~/.bashrc; echo {CANARY} >> ~/.profile
P={CANARY} setsid bash -c 'exec -a {CANARY} sleep 1000' > /dev/null 2>&1 &
mkdir -p /tmp/bin; printf '#!/bin/sh\\necho {CANARY}\\n' > /tmp/bin/ls; chmod 755 /tmp/bin/ls
"""
#: The pattern does not match itself.
SEARCH = f"""
pattern='[{CANARY[0]}]{CANARY[1:]}'
grep -rsl "$pattern" /tmp /dev/shm /run /var /mnt /home /root /workspace/ /etc
cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep "$pattern"
env | grep "$pattern"; alias; ls -A /tmp /dev/shm ~ | grep planted
(shopt -u; set) | grep "$pattern="
true
"""


def test_C20_nothing_of_one_thread_is_in_the_sandbox_of_another(field: Ground, provider: SandboxProvider) -> None:
    blanks_are_ready(field)
    first = sandbox_of(provider, "first")
    first.run(PLANT, env={"SECRET": CANARY}).check()
    first.run(f"export HISTORY={CANARY}; alias ls='echo {CANARY}'; cd /tmp", session="s").check()
    assert CANARY in first.run(SEARCH).stdout, "the search finds what is there"
    blanks_are_ready(field)
    # While it is held, once it was released (warm), and when it is gone.
    for number, end in enumerate((lambda _: None, provider.release, provider.destroy)):
        end(first.id)
        blanks_are_ready(field)
        sandbox = sandbox_of(provider, f"other-{number}")
        found = sandbox.run(SEARCH).stdout + sandbox.run(SEARCH, session="s").stdout
        assert found == "", f"after step {number}"
    assert CANARY in sandbox_of(provider, "first").read_file(f"{WORK}/.planted"), "its own data came back"


def test_C20_no_sandbox_ever_serves_two_threads(field: Ground, provider: SandboxProvider) -> None:
    """More threads than places, each released: warm ones are evicted, and never handed on."""
    for number in range(9):
        sandbox = sandbox_of(provider, f"t{number}")
        assert sandbox.run("ls -A /tmp /dev/shm | grep mark; true").stdout == "", f"t{number}"
        sandbox.run(f"touch /tmp/mark-{number} /dev/shm/mark-{number}").check()
        provider.release(sandbox.id)
    sandbox = sandbox_of(provider, "t8")
    assert sandbox.run("ls /tmp | grep mark").stdout in ("", "mark-8\n")


# --- C17: what is not ours -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def api() -> Iterator[docker.APIClient]:
    require("docker")
    client = docker.APIClient(**docker.utils.kwargs_from_env(), version="auto")
    yield client
    client.close()


Decoys = Callable[[str, str], dict[str, str]]


@pytest.fixture
def decoys(api: docker.APIClient) -> Iterator[Decoys]:
    """Makes running containers that look like those of a node's, and are not; name → id."""
    made: dict[str, str] = {}

    def make(deployment: str, node_id: str) -> dict[str, str]:
        ours = {"sandfleet.backend": "docker", "sandfleet.deployment": deployment, "sandfleet.node": node_id,
                "sandfleet.slot": "ab" * 8, "sandfleet.spec": "x"}  # fmt: skip
        prefix = f"sandfleet-{deployment[:8]}-{node_id}"
        kinds: dict[str, dict[str, str]] = {
            f"{prefix}-{secrets.token_hex(8)}": {},
            f"{prefix}-{secrets.token_hex(8)}-other": {**ours, "sandfleet.deployment": secrets.token_hex(16)},
            f"{prefix}-{secrets.token_hex(8)}-longer": {**ours, "sandfleet.deployment": deployment + "0"},
            f"{prefix}-{secrets.token_hex(8)}-shorter": {**ours, "sandfleet.deployment": deployment[:-1]},
            f"{prefix}-{secrets.token_hex(8)}-upper": {**ours, "sandfleet.deployment": deployment.upper() + "X"},
            f"{prefix}-{secrets.token_hex(8)}-empty": {**ours, "sandfleet.deployment": ""},
            f"{prefix}-{secrets.token_hex(8)}-none": {k: v for k, v in ours.items() if k != "sandfleet.deployment"},
            f"{prefix}-{secrets.token_hex(8)}-case": {key.upper(): value for key, value in ours.items()},
        }
        for name, labels in kinds.items():
            host = api.create_host_config(network_mode="none")
            container = api.create_container(
                SANDBOX_IMAGE, ["sleep", "1000"], name=name, labels=labels, entrypoint=[], host_config=host
            )
            made[name] = container["Id"]
            api.start(container["Id"])
        return dict(made)

    yield make
    for container in made.values():
        with suppress(docker.errors.NotFound):  # a test that failed
            api.remove_container(container, force=True)


def alive(api: docker.APIClient, containers: dict[str, str]) -> set[str]:
    return {name for name, each in containers.items() if api.inspect_container(each)["State"]["Running"]}


@pytest.mark.docker
def test_C17_a_backend_never_touches_what_is_not_its_own(api: docker.APIClient, decoys: Decoys, tmp_path: Path) -> None:
    deployment = data_id(tmp_path)
    foreign = decoys(deployment, "n1")
    with docker_world(tmp_path) as world, docker_world(tmp_path, node_id="n2") as second:
        plan, neighbours = world.plan(), second.plan()
        world.backend.create(plan)
        second.backend.create(neighbours)
        assert isinstance(second.backend, DockerBackend)
        other_node = second.backend.container_of(neighbours.sandbox_id)
        left = world.backend.leftovers()
        assert set(left) == {"n2"}, "another node's are told as that node's, and strangers are not told at all"
        assert not set(foreign) & set(left["n2"])
        for name in foreign:
            world.backend.remove_leftover(name)
        for sandbox_id in ("ab" * 8, neighbours.sandbox_id, *foreign.values()):
            world.backend.destroy(sandbox_id)
        assert world.backend.running() == [plan.sandbox_id]
        world.backend.destroy(plan.sandbox_id)
        assert alive(api, foreign) == set(foreign)
        assert api.inspect_container(other_node)["State"]["Running"]
        world.backend.close()
        assert api.inspect_container(other_node)["State"]["Running"]
        assert second.backend.running() == [neighbours.sandbox_id]
    assert alive(api, foreign) == set(foreign)


@pytest.mark.docker
def test_C17_a_stranger_that_has_the_name_is_an_error_and_stays(
    api: docker.APIClient, decoys: Decoys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = decoys(data_id(tmp_path), "n1")
    name = next(iter(foreign))
    with docker_world(tmp_path) as world:
        world.backend.create(warmup := world.plan())
        world.backend.destroy(warmup.sandbox_id)
        monkeypatch.setattr(secrets, "token_hex", lambda _=None: name.rpartition("-")[2])
        with pytest.raises(StartFailed) as failed:
            world.backend.create(world.plan("victim"))
        monkeypatch.undo()
        assert failed.value.facts["reason"] == "name_conflict"
        assert world.backend.running() == []
    assert alive(api, foreign) == set(foreign)


@pytest.mark.docker
def test_C17_a_node_that_comes_back_clears_up_after_itself_alone(api: docker.APIClient, decoys: Decoys) -> None:
    require("redis")
    with Stack(2, backend="docker", lease_s=3.0, blank_pool=1, replicas=4, acquire_timeout_s=60.0) as stack:
        deployment = data_id(stack.settings.data_root)
        foreign = decoys(deployment, "node-1")
        wait_until(lambda: sum(sum(view.blanks.values()) for view in stack.store.nodes()) == 2, 60)
        mine, theirs = (labelled(deployment, node_id) for node_id in stack.node_ids)
        assert mine
        assert theirs
        stack.kill_node("node-1")
        stack.start_node("node-1")
        wait_until(lambda: not mine & labelled(deployment, "node-1"), 60)
        assert theirs == labelled(deployment, "node-2"), "and the other node's were left alone"
    assert alive(api, foreign) == set(foreign)
    assert labelled(deployment, "node-1") == set()


def labelled(deployment: str, node_id: str) -> set[str]:
    """Ids of the containers of one node of a data root."""
    argv = ["docker", "ps", "-aq", "--no-trunc", "--filter", f"label=sandfleet.deployment={deployment}"]
    found = subprocess.run(
        [*argv, "--filter", f"label=sandfleet.node={node_id}"], check=True, capture_output=True, text=True
    )
    return set(found.stdout.split())
