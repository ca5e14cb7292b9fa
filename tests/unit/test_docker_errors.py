"""What an engine says, and what a caller hears."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from typing import Any

import docker.errors
import pytest
import requests

from sandfleet.config import Settings
from sandfleet.errors import ConfigError, StartFailed
from sandfleet_workers.backends.docker.deaths import how_it_ended
from sandfleet_workers.backends.docker.engine import Engine
from sandfleet_workers.backends.docker.failures import failure_of, pull_failure
from sandfleet_workers.backends.docker.images import Images
from sandfleet_workers.backends.docker.output import Output, Silence


def refused(status: int, told: str) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = status
    return docker.errors.APIError("refused", response=response, explanation=told)


@pytest.mark.parametrize(
    ("exc", "reason", "words"),
    [
        (refused(404, "No such image: a/b:1"), "no_image", "docker pull a/b:1"),
        (refused(409, 'Conflict. The name "/x" is already in use'), "name_conflict", "sandbox.container_prefix"),
        (refused(400, "invalid mount config: bind source path does not exist: /d"), "bad_mount", "/d"),
        (refused(400, "unknown or invalid runtime name: runsc"), "no_runtime", "daemon.json"),
        (refused(500, "write /var/lib/docker/x: no space left on device"), "disk", "free space"),
        (refused(500, "error setting rlimits for ready process: operation not permitted"), "limits", "sandbox.nofile"),
        (refused(400, 'OCI runtime: exec: "/bin/sh": stat /bin/sh: no such file'), "image_unusable", "/bin/sh"),
        (refused(404, "network sandfleet-1 not found"), "no_network", "docker_network"),
        (refused(500, "something else"), "engine_error", "something else"),
        (requests.exceptions.ReadTimeout("Read timed out."), "timeout", "in time"),
        (requests.exceptions.ConnectionError("UnixHTTPConnectionPool: Read timed out."), "timeout", "in time"),
        (requests.exceptions.ConnectionError("FileNotFoundError(2, 'No such file')"), "no_daemon", "no such socket"),
        (requests.exceptions.ConnectionError("PermissionError(13, 'Permission denied')"), "no_daemon", "group"),
        (requests.exceptions.ConnectionError("Connection refused"), "no_daemon", "start it"),
        (docker.errors.DockerException("Error while fetching server API version"), "no_daemon", "tcp://host:1"),
    ],
)  # fmt: skip
def test_every_failure_has_a_word_and_says_what_to_do(exc: Exception, reason: str, words: str) -> None:
    error = failure_of(exc, "create container x", "tcp://me:secret@host:1", {"image": "a/b:1"})
    assert isinstance(error, StartFailed)
    assert error.facts["reason"] == reason
    assert words in str(error).replace("host:1;", "tcp://host:1;")
    assert "secret" not in str(error)


def test_our_own_image_says_how_it_is_made() -> None:
    assert "`make images`" in str(pull_failure("sandfleet/sandbox:latest", "manifest unknown"))
    assert "make images" not in str(pull_failure("a/b:1", "manifest unknown"))


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("pull access denied for a/b, repository does not exist or may require 'docker login'", "pull_denied"),
        ("unauthorized: authentication required", "pull_denied"),
        ("manifest for a/b:1 not found: manifest unknown", "no_image"),
        ("dial tcp 127.0.0.1:1: connect: connection refused", "no_image"),
        ("failed to register layer: no space left on device", "disk"),
    ],
)
def test_a_pull_fails_for_a_reason(told: str, reason: str) -> None:
    error = pull_failure("a/b:1", told)
    assert error.facts == {"reason": reason, "image": "a/b:1"}
    assert told in str(error)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "its container was removed"),
        ({"ExitCode": 0}, "exited with 0"),
        ({"ExitCode": 2, "OOMKilled": True}, "exited with 2"),
        ({"ExitCode": 128 + signal.SIGKILL}, "killed by SIGKILL"),
        ({"ExitCode": 128 + signal.SIGKILL, "OOMKilled": True}, "out of memory"),
        ({"ExitCode": 128 + signal.SIGSEGV}, "killed by SIGSEGV"),
        ({"ExitCode": 255}, "exited with 255"),
    ],
)
def test_an_end_is_told_in_words(state: dict[str, Any] | None, words: str) -> None:
    assert how_it_ended(state) == words


# --- what a starting container writes ------------------------------------------------------------


def frame(stream: int, text: bytes) -> bytes:
    return struct.pack(">BxxxL", stream, len(text)) + text


@pytest.fixture
def pair() -> Any:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_the_first_line_is_found_in_whatever_pieces_it_comes(pair: Any) -> None:
    ours, theirs = pair
    for byte in frame(2, b"a warning\n") + frame(1, b"rea") + frame(1, b"dy 80\nmore"):
        theirs.send(bytes([byte]))
    output = Output(ours)
    assert output.line(time.monotonic() + 5) == "ready 80"
    assert output.told == "a warning"


def test_silence_ends_at_the_deadline(pair: Any) -> None:
    with pytest.raises(Silence):
        Output(pair[0]).line(time.monotonic() + 0.01)


def test_the_end_without_a_line_leaves_the_last_words(pair: Any) -> None:
    ours, theirs = pair
    theirs.sendall(frame(2, b"cannot start: no json\n"))
    theirs.close()
    output = Output(ours)
    assert output.line(time.monotonic() + 5) is None
    assert output.told == "cannot start: no json"


@pytest.mark.parametrize("flood", [frame(1, b"x" * 60_000) * 3, struct.pack(">BxxxL", 1, 2**31) + b"x" * 200_000])
def test_a_flood_is_no_start(pair: Any, flood: bytes) -> None:
    ours, theirs = pair
    writer = threading.Thread(target=lambda: _send(theirs, flood), daemon=True)
    writer.start()
    assert Output(ours).line(time.monotonic() + 5) is None
    ours.close()
    writer.join(5)


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:  # the reader has had enough
        pass


# --- images --------------------------------------------------------------------------------------


class Registry:
    """An engine with no image yet, whose registry takes its time."""

    def __init__(self) -> None:
        self.pulls = 0
        self.there = False
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.auths: list[Any] = []

    def inspect_image(self, image: str) -> dict[str, str]:
        if not self.there:
            raise docker.errors.ImageNotFound(
                "none", response=requests.Response(), explanation=f"No such image: {image}"
            )
        return {"Id": f"sha256:{self.pulls}"}

    def pull(self, image: str, **given: Any) -> list[dict[str, str]]:
        self.pulls += 1
        self.auths.append(given["auth_config"])
        self.begun.set()
        assert self.go_on.wait(5)
        self.there = True
        return [{"status": "done"}]


def images(registry: Registry, **container: Any) -> Images:
    engine = Engine.__new__(Engine)
    engine.api, engine.address = registry, "unix:///x"
    return Images(engine, Settings(container=container).container)


def test_an_image_that_many_want_is_pulled_once() -> None:
    registry = Registry()
    wanted, got = images(registry), list[str]()
    threads = [threading.Thread(target=lambda: got.append(wanted.ensure("a:1"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert registry.begun.wait(5)
    registry.go_on.set()
    for thread in threads:
        thread.join(5)
    assert got == ["sha256:1"] * 4
    assert wanted.ensure("a:1") == "sha256:1"
    assert registry.pulls == 1


def test_always_pulls_each_time_and_never_does_not() -> None:
    registry = Registry()
    registry.go_on.set()
    wanted = images(registry, image_pull_policy="Always")
    assert [wanted.ensure("a:1"), wanted.ensure("a:1")] == ["sha256:1", "sha256:2"]
    registry.there = False
    with pytest.raises(StartFailed) as caught:
        images(registry, image_pull_policy="Never").ensure("a:1")
    assert caught.value.facts["reason"] == "no_image"
    assert registry.pulls == 2


def test_the_registrys_credentials_are_those_of_the_file(tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"auths": {"registry.example": {"auth": "bWU6c2VjcmV0"}}}')
    registry = Registry()
    registry.go_on.set()
    wanted = images(registry, registry_config=str(path), image_pull_policy="Always")
    wanted.ensure("registry.example/a:1")
    wanted.ensure("other.example/a:1")
    assert (registry.auths[0]["username"], registry.auths[0]["password"]) == ("me", "secret")
    assert registry.auths[1] == {}, "another registry gets nothing"


@pytest.mark.parametrize("content", ["{", "[]", "user = me-and-my-secret", None])
def test_a_file_that_holds_no_credentials_stops_the_node(tmp_path: Any, content: str | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"sandbox\.registry_config .*config\.json") as caught:
        images(Registry(), registry_config=str(path))
    assert "secret" not in str(caught.value)
