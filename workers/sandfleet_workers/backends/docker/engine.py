"""Talking to a Docker engine: every way it can fail becomes a `StartFailed` that says what to do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import docker
import docker.errors
import docker.utils
import requests
import urllib3.exceptions

from sandfleet.errors import StartFailed
from sandfleet_workers.backends.docker.failures import failure_of
from sandfleet_workers.backends.docker.output import Output

__all__ = ["TROUBLE", "Engine", "EngineFacts"]

log = logging.getLogger("sandfleet.node")

#: Whatever the SDK and what it is built upon raise when the engine does not do as asked.
TROUBLE = (docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError)
_LOST_ANSWER = (requests.ConnectionError, requests.Timeout)
_USUAL_SOCKET = "unix:///var/run/docker.sock"
_QUICK_S = 5.0
_GONE_WITHIN_S = 20.0
_AWAY_S = 3.0
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine tells of itself.

    Attributes:
        runtimes: Names of its OCI runtimes.
        cgroup_v2: Whether its host has unified control groups.
        uid_base: The host's uid of root in its containers; 0 without a user namespace.
        rootless: Whether a normal user runs it: root in its containers is that user.
    """

    runtimes: frozenset[str]
    cgroup_v2: bool
    uid_base: int
    rootless: bool


class Engine:
    """A connection to one engine. Thread-safe; blocks.

    Args:
        address: Where it is; empty takes ``DOCKER_HOST``, else the usual socket.
        timeout_s: How long one answer may take, in seconds.
        starts: How many containers it may be starting at once.

    Raises:
        StartFailed: ``reason`` no_daemon: nobody answers there.
    """

    def __init__(self, address: str = "", *, timeout_s: float = 60.0, starts: int = 4) -> None:
        given = docker.utils.kwargs_from_env()
        self.address = address or given.get("base_url") or _USUAL_SOCKET
        self._given: dict[str, Any] = {**given, "base_url": self.address, "version": "auto"}
        self._starts = threading.BoundedSemaphore(starts)
        with self.calls("connect"):
            #: For whoever needs more of the API than is here.
            self.api = docker.APIClient(**self._given, timeout=int(timeout_s))
            #: The same, for whoever can do without an answer: it does not wait long.
            self.quick_api = docker.APIClient(**{**self._given, "version": self.api.api_version}, timeout=int(_QUICK_S))
        for api in (self.api, self.quick_api):
            # The SDK keeps connections by address and asks each address once: it would only collect them, 25 and more.
            api.headers["Connection"] = "close"
        self.facts = self._facts()

    @property
    def is_local(self) -> bool:
        """Whether it is reached by a socket of this machine (or one that was mounted here)."""
        return self.address.startswith(("unix://", "http+unix://", "/"))

    def close(self) -> None:
        """Drop the sockets."""
        self.api.close()
        self.quick_api.close()

    @contextmanager
    def calls(self, what: str, **facts: Any) -> Iterator[None]:
        """Whatever goes wrong inside is raised as a `StartFailed` with a reason.

        Args:
            what: What is done, as a verb with its object.
            facts: For the error.
        """
        try:
            yield
        except TROUBLE as exc:
            raise failure_of(exc, what, self.address, facts) from exc

    @contextmanager
    def starting(self) -> Iterator[None]:
        """One of the starts that the engine may be busy with."""
        with self._starts:
            yield

    def _facts(self) -> EngineFacts:
        with self.calls("ask for its facts"):
            info = self.api.info()
        options = [str(option) for option in info.get("SecurityOptions") or ()]
        names = {part for option in options for part in option.split(",") if part.startswith("name=")}
        uid_base = 0
        if "name=userns" in names:
            # DockerRootDir ends with the ids that root in a container has outside: /var/lib/docker/100000.100000
            word = str(info.get("DockerRootDir", "")).rpartition("/")[2].partition(".")[0]
            uid_base = int(word) if word.isdecimal() else 0
        return EngineFacts(
            runtimes=frozenset(info.get("Runtimes") or ()),
            cgroup_v2=str(info.get("CgroupVersion", "1")) == "2",
            uid_base=uid_base,
            rootless="name=rootless" in names,
        )

    # --- containers ----------------------------------------------------------------------------

    def create(self, name: str, body: Mapping[str, Any]) -> str:
        """Make a container of that name; its id.

        A container that an earlier attempt of this call made, whose answer was lost, is taken; another one with our
        labels is what a dead start left and is removed.

        Raises:
            StartFailed: ``reason`` name_conflict when somebody else's has the name, and every other way it can fail.
        """
        unsure = False
        for left in reversed(range(_ATTEMPTS)):
            try:
                with self.calls(f"create container {name}", image=body.get("Image")):
                    made = self.api.create_container_from_config(dict(body), name)  # type: ignore[no-untyped-call]
                    return str(made["Id"])
            except StartFailed as exc:
                lost = isinstance(exc.__cause__, _LOST_ANSWER)
                unsure = unsure or lost
                if not left or not (lost or exc.facts.get("reason") == "name_conflict"):
                    if unsure:
                        self._undo_create(name, body)
                    raise
                if not lost and (found := self._adopted(name, body, exc, unsure=unsure)) is not None:
                    return found
        raise AssertionError("unreachable")

    def _adopted(self, name: str, body: Mapping[str, Any], conflict: StartFailed, *, unsure: bool) -> str | None:
        """The container that has the name, if this very call made it; None when the name is free by now."""
        there = self.inspect(name)
        if there is None:
            return None
        if not _carries(there, body["Labels"]):
            raise conflict
        if unsure and there.get("State", {}).get("Status") == "created":
            log.info("container.adopted", extra={"container": name})
            return str(there["Id"])
        self.remove(str(there["Id"]))
        return None

    def _undo_create(self, name: str, body: Mapping[str, Any]) -> None:
        """An attempt whose answer was lost may have made a container all the same."""
        try:
            there = self.inspect(name)
            if there is not None and _carries(there, body["Labels"]):
                self.remove(str(there["Id"]))
        except StartFailed as exc:  # the node looks for leftovers later
            log.warning("container.not_removed", extra={"container": name, "error": str(exc)})

    def start(self, container: str) -> None:
        """Start a created container.

        Raises:
            StartFailed: It does not start.
        """
        with self.calls("start the container"):
            self.api.start(container)

    def attach(self, container: str) -> Output:
        """What it writes, from now on; ask before it is started.

        Raises:
            StartFailed: The engine does not hand it out.
        """
        with self.calls("attach to the container"):
            return Output(self.api.attach_socket(container, {"stdout": 1, "stderr": 1, "stream": 1}))

    def inspect(self, container: str, *, quickly: bool = False) -> dict[str, Any] | None:
        """What the engine knows of it; None when there is none.

        Raises:
            StartFailed: The engine does not answer.
        """
        api = self.quick_api if quickly else self.api
        with self.calls("look at the container"):
            try:
                found: dict[str, Any] = api.inspect_container(container)
            except docker.errors.NotFound:
                return None
            return found

    def wait(self, container: str, timeout_s: float) -> int | None:
        """Its exit code, once it has ended; None when it has not in time, or is gone.

        Raises:
            StartFailed: The engine does not answer.
        """
        with self.calls("wait for the container's end"):
            try:
                return int(self.api.wait(container, timeout=timeout_s)["StatusCode"])  # type: ignore[arg-type]
            except (docker.errors.NotFound, requests.ReadTimeout):
                return None
            except requests.ConnectionError as exc:
                if "timed out" in str(exc).lower():  # how a read timeout within a chunked answer shows
                    return None
                raise

    def remove(self, container: str) -> None:
        """Kill it, remove it with its anonymous volumes, and return when it is gone; one that is gone is fine.

        Raises:
            StartFailed: It is still there.
        """
        began = time.monotonic()
        until = began + _GONE_WITHIN_S
        while True:
            try:
                with self.calls("remove the container"):
                    try:
                        self.api.remove_container(container, v=True, force=True)
                    except docker.errors.NotFound:
                        return
                if self.inspect(container) is None:
                    return
                problem = StartFailed(f"container {container[:12]} is still there after its removal", reason="not_gone")
            except StartFailed as exc:  # "removal is already in progress", or the engine is busy or away for a moment
                problem = exc
                if exc.facts.get("reason") == "no_daemon":
                    until = min(until, began + _AWAY_S)
            if time.monotonic() > until:
                raise problem
            time.sleep(0.1)

    def labelled(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """All containers, running or not, that carry these labels.

        Raises:
            StartFailed: The engine does not answer.
        """
        wanted = [f"{key}={value}" for key, value in labels.items()]
        with self.calls("list containers"):
            found: list[dict[str, Any]] = self.api.containers(all=True, filters={"label": wanted})
        # Looked at once more: whoever removes what a filter let through removes somebody else's.
        return [each for each in found if labels.items() <= (each.get("Labels") or {}).items()]

    def events(self, labels: Mapping[str, str], since_s: float | None) -> Any:
        """A stream of the deaths of containers with these labels; ``close()`` ends it from another thread.

        Args:
            labels: Of the containers.
            since_s: Begin with those at or after this time of the engine's clock; None begins now.

        Raises:
            StartFailed: The engine does not answer.
        """
        filters = {
            "type": ["container"],
            "event": ["die", "destroy"],
            "label": [f"{key}={value}" for key, value in labels.items()],
        }
        with self.calls("follow events"):
            return self.api.events(since=None if since_s is None else int(since_s), filters=filters, decode=True)

    # --- networks ------------------------------------------------------------------------------

    def ensure_network(self, name: str, labels: Mapping[str, str], *, internal: bool = False) -> None:
        """A bridge of that name, on which containers cannot reach each other; ``internal``: nor anything beyond it.

        Raises:
            StartFailed: It cannot be made, or another one has the name.
        """
        options = {"com.docker.network.bridge.enable_icc": "false"}
        with self.calls(f"make network {name}"):
            try:
                found = self.api.inspect_network(name)
            except docker.errors.NotFound:
                try:
                    self.api.create_network(
                        name,
                        driver="bridge",
                        options=options,
                        labels=dict(labels),
                        check_duplicate=True,
                        internal=internal,
                    )
                    return
                except docker.errors.APIError as exc:
                    if exc.status_code != 409:
                        raise
                    found = self.api.inspect_network(name)  # another node was faster
        if not labels.items() <= (found.get("Labels") or {}).items():
            raise StartFailed(
                f"the Docker network {name} is not ours; remove it, or name another by sandbox.docker_network",
                reason="name_conflict",
            )

    def has_network(self, name: str) -> bool:
        """Whether there is a network of that name.

        Raises:
            StartFailed: The engine does not answer.
        """
        with self.calls(f"look for network {name}"):
            return any(each.get("Name") == name for each in self.api.networks(names=[name]))

    def drop_network(self, name: str) -> None:
        """Remove a network that nobody is on; another is left alone."""
        try:
            self.api.remove_network(name)
        except TROUBLE as exc:
            log.debug("network.kept", extra={"network": name, "reason": str(exc)})


def _carries(container: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether an inspected container has all of these labels."""
    return labels.items() <= ((container.get("Config") or {}).get("Labels") or {}).items()
