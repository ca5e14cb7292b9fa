"""`docker-compose.yaml` brings up a whole fleet: what README says about it, on an engine of this machine."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services import CHECKOUT, build_images, require, wait_until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first build on a machine downloads everything
]

WORKERS = 2
UP_S = 150
RETURN_S = 60.0


def docker(*argv: str) -> str:
    done = subprocess.run(["docker", *argv], capture_output=True, text=True, timeout=UP_S + 60, check=False)
    assert done.returncode == 0, f"docker {' '.join(argv)}: {done.stdout}{done.stderr}"
    return done.stdout


class Project:
    """One run of the file, with names, passwords, port and directories of its own."""

    def __init__(self) -> None:
        self.name = f"sandfleet-test-{secrets.token_hex(4)}"
        # Short, and not below pytest's own: the sandboxes' users must be able to enter it.
        self.directory = Path(tempfile.mkdtemp(prefix="sf-"))
        self.directory.chmod(0o755)
        self.data_root = self.directory / "data"
        self.passwords = {"REDIS_PASSWORD": secrets.token_hex(12), "FLOWER_PASSWORD": secrets.token_hex(12)}
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("SANDFLEET_", "COMPOSE_"))}
        self.environ = {
            **mine,
            **self.passwords,
            "FLOWER_PORT": "0",
            "SANDFLEET_DATA_ROOT": str(self.data_root),
            "SANDFLEET_RUN_ROOT": str(self.directory / "run"),
        }

    def __call__(self, *argv: str) -> str:
        """What ``docker compose argv`` prints."""
        done = self.run(*argv)
        assert done.returncode == 0, f"docker compose {' '.join(argv)}: {done.stdout}{done.stderr}"
        return done.stdout

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """``docker compose argv``, whatever comes of it."""
        command = ["docker", "compose", "--project-name", self.name, "--env-file", os.devnull, *argv]
        return subprocess.run(
            command, cwd=CHECKOUT, env=self.environ, capture_output=True, text=True, timeout=UP_S + 60, check=False
        )

    def up(self, workers: int) -> None:
        """Start everything and wait until all of it is healthy."""
        argv = ["up", "--detach", "--wait", "--wait-timeout", str(UP_S), "--scale", f"worker={workers}"]
        done = self.run(*argv)
        assert done.returncode == 0, f"{done.stderr[-3000:]}\n{self.run('logs', '--tail=40').stdout}"

    def down(self) -> None:
        """End and remove all of it; what a failed test left, too."""
        try:
            self("down", "--volumes", "--timeout", "60")
        finally:
            shutil.rmtree(self.directory)

    def sandfleet(self, *argv: str) -> str:
        """What ``sandfleet argv`` prints in the scheduler's container."""
        return self("exec", "--no-TTY", "scheduler", "sandfleet", *argv)

    def in_thread(self, thread: str, command: str) -> str:
        """What a command prints in the thread's sandbox."""
        return self.sandfleet("exec", "--thread", thread, "--", command)

    def alive(self) -> set[str]:
        """The ids of the nodes that take sandboxes."""
        nodes = json.loads(self.sandfleet("nodes", "--json"))["nodes"]
        return {node["node_id"] for node in nodes if node["state"] == "ready" and node["alive"]}

    def containers(self, service: str = "") -> list[str]:
        """The service's containers, or all of this file's."""
        return self("ps", "--all", "--quiet", *filter(None, [service])).split()

    def sandboxes(self) -> list[str]:
        """The containers that its nodes made."""
        deployment = (self.data_root / "data-id").read_text().strip()
        return docker("ps", "--all", "--quiet", "--filter", f"label=sandfleet.deployment={deployment}").split()


def inspect(containers: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(docker("inspect", *containers))
    return found


@pytest.fixture(scope="module")
def images() -> None:
    require("compose")
    build_images()


@pytest.fixture(scope="module")
def fleet(images: None) -> Iterator[Project]:
    project = Project()
    try:
        project.up(WORKERS)
        yield project
    finally:
        project.down()


def test_every_service_tells_whether_it_is_healthy(fleet: Project) -> None:
    states = {facts["Name"]: facts["State"]["Health"]["Status"] for facts in inspect(fleet.containers())}
    assert len(states) == 3 + WORKERS
    assert set(states.values()) == {"healthy"}, states


def test_two_workers_on_one_engine_are_two_nodes(fleet: Project) -> None:
    wait_until(lambda: len(fleet.alive()) == WORKERS, RETURN_S, story=lambda: fleet.sandfleet("nodes"))


def test_doctor_finds_nothing_wrong_in_a_worker_and_knows_its_directories_on_the_host(fleet: Project) -> None:
    told = json.loads(fleet("exec", "--no-TTY", "worker", "sandfleet", "doctor", "--json"))
    found = {check["name"]: check["status"] for check in told["checks"]}
    assert told["ok"], told
    assert (found["docker data root"], found["docker run root"], found["docker image"]) == ("ok", "ok", "ok")


def test_a_thread_works_in_a_container_without_network_and_its_files_lie_on_the_host(fleet: Project) -> None:
    told = fleet.in_thread("alice", "id -u; pwd; echo kept > file; ls /sys/class/net")
    assert told.split() == ["10001", "/mnt/user-data/workspace", "lo"]
    assert (fleet.data_root / "threads/alice/user-data/workspace/file").read_text() == "kept\n"
    assert {facts["HostConfig"]["NetworkMode"] for facts in inspect(fleet.sandboxes())} == {"none"}


def test_a_worker_that_is_restarted_comes_back_under_its_id_and_threads_find_their_files(fleet: Project) -> None:
    before = fleet.alive()
    fleet.in_thread("bob", "echo kept > file")
    docker("restart", "--time", "60", fleet.containers("worker")[0])
    wait_until(lambda: fleet.alive() == before, RETURN_S, story=lambda: fleet("logs", "--tail=40", "worker"))
    assert fleet.in_thread("bob", "cat file") == "kept\n"


def test_redis_wants_its_password_and_keeps_what_it_is_told(fleet: Project) -> None:
    assert "NOAUTH" in fleet("exec", "--no-TTY", "redis", "redis-cli", "ping")
    ask = "REDISCLI_AUTH=$(sed -n 's/^requirepass //p' /etc/redis.conf) redis-cli config get"
    for name, value in (("appendonly", "yes"), ("maxmemory-policy", "noeviction"), ("maxmemory", str(2 * 1024**3))):
        told = fleet("exec", "--no-TTY", "redis", "sh", "-c", f"{ask} {name}")
        assert told.split() == [name, value]


def test_only_flower_is_published_and_it_wants_its_password(fleet: Project) -> None:
    published = [
        (facts["Config"]["Labels"]["com.docker.compose.service"], binding["HostIp"])
        for facts in inspect(fleet.containers())
        for bindings in facts["NetworkSettings"]["Ports"].values()
        for binding in bindings or []
    ]
    assert published == [("flower", "127.0.0.1")]
    url = f"http://{fleet('port', 'flower', '5555').strip()}/workers"
    assert status_of(url) == 401
    assert status_of(url, f"sandfleet:{fleet.passwords['REDIS_PASSWORD']}") == 401
    assert status_of(url, f"sandfleet:{fleet.passwords['FLOWER_PASSWORD']}") == 200


def status_of(url: str, login: str = "") -> int:
    headers = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if login else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code


def test_no_password_is_shown_by_inspect_or_on_a_command_line(fleet: Project) -> None:
    fleet.in_thread("alice", "true")
    told = docker("inspect", *fleet.containers(), *fleet.sandboxes())
    told += "".join(docker("top", container, "-eo", "pid,args") for container in fleet.containers())
    assert not [name for name, password in fleet.passwords.items() if password in told]


def test_only_workers_are_root(fleet: Project) -> None:
    users = {
        facts["Config"]["Labels"]["com.docker.compose.service"]: facts["Config"]["User"]
        for facts in inspect(fleet.containers())
    }
    assert users == {"redis": "redis", "scheduler": "10002:10002", "flower": "10002:10002", "worker": "0:0"}


def test_down_leaves_no_sandbox_network_or_volume(images: None) -> None:
    project = Project()
    try:
        project.up(1)
        project.in_thread("alice", "sleep 1000 & echo started")
        assert project.sandboxes()
        project("down", "--volumes")
        assert project.sandboxes() == []
        label = f"label=com.docker.compose.project={project.name}"
        for kind in (["ps", "--all"], ["network", "ls"], ["volume", "ls"]):
            assert docker(*kind, "--quiet", "--filter", label) == ""
    finally:
        project.down()


def test_without_passwords_nothing_starts_and_the_message_says_where_to_put_them(images: None) -> None:
    project = Project()
    try:
        for name in project.passwords:
            without = dict(project.environ)
            del without[name]
            project.environ, kept = without, project.environ
            refused = project.run("up", "--detach")
            project.environ = kept
            assert refused.returncode != 0
            assert name in refused.stderr
            assert ".env.example" in refused.stderr
    finally:
        project.down()
