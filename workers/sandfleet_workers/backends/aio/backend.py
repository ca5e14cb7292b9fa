"""The AIO backend: the Docker backend's containers with a server of their own instead of sandboxd."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from sandfleet.backends import Capability, Liveness, Operation, SandboxPlan
from sandfleet.config import Settings
from sandfleet.errors import StartFailed
from sandfleet.ids import new_op_id
from sandfleet_workers.backends import local_dirs
from sandfleet_workers.backends.aio.body import CAPABILITIES, aio_body
from sandfleet_workers.backends.aio.connection import AioConnection, AioDialect
from sandfleet_workers.backends.aio.endpoint import AioEndpoint
from sandfleet_workers.backends.docker.backend import DockerBackend
from sandfleet_workers.backends.docker.deaths import how_it_ended
from sandfleet_workers.backends.docker.engine import Engine
from sandfleet_workers.backends.docker.host import sandbox_user
from sandfleet_workers.backends.docker.hostconfig import USER_DATA, Bind, Place
from sandfleet_workers.backends.docker.policy import Policy
from sandfleet_workers.backends.docker.program import Program, Programs
from sandfleet_workers.backends.docker.sandbox import Sandbox, Vital, open_pidfd
from sandfleet_workers.backends.docker.starting import Launch, Starter, ticket_of
from sandfleet_workers.backends.docker.ways import Ways, address_in
from sandfleet_workers.waiter import Waiter

__all__ = ["AioBackend"]

#: Such an image starts a dozen services before it answers.
_READY_S = 60.0
_ASK_S = 2.0
_PAUSE_S = 0.1
_DYING_S = 0.5
#: Whom an all-in-one image runs commands as.
_USER = "1000:1000"


class AioBackend(DockerBackend):
    """Sandboxes in containers of an AIO image; `body` says what they may.

    An image takes long to start, so blank ones are worth more here than anywhere. ``container_user`` is the user that
    the image's server runs commands as (1000 where it is not set): the thread's directories are given to it.
    """

    name: ClassVar[str] = "aio"
    #: Its server keeps no record of what was begun, so nobody could tell how it ended.
    capabilities: ClassVar[frozenset[Capability]] = DockerBackend.capabilities - {
        Capability.SURVIVES_NODE,
        Capability.JOBS,
        Capability.PTY,
    }
    isolation: ClassVar[str] = "container (its own server; shares the host kernel unless its runtime does not)"
    default_image: ClassVar[str] = "ghcr.io/agent-infra/sandbox:latest"
    #: For a subclass whose image's server asks for a bearer token.
    token: ClassVar[str | None] = None
    ready_s: ClassVar[float] = _READY_S

    def __init__(self, settings: Settings, on_death: Callable[[str, str], None], waiter: Waiter | None = None) -> None:
        super().__init__(settings, on_death, waiter)
        facts = self._engine.facts
        if os.geteuid() == 0:
            user, self._host_uid = sandbox_user(settings.container.container_user or _USER, facts)
            self._rules = replace(self._rules, user=user)
        self._rules = replace(self._rules, cap_add=CAPABILITIES)
        self._programs = _NothingOfOurs()
        self._starter = _AioStarter(
            self._engine,
            self._ways,
            self._host_uid,
            max(settings.start_timeout_s, self.ready_s),
            self._waiter,
            self.token,
        )

    @property
    def _closed_network(self) -> str:
        return f"{self._networks.own}-closed"

    @property
    def _own_networks(self) -> tuple[str, ...]:
        return *super()._own_networks, self._closed_network

    def _network(self, policy: Policy) -> tuple[str, int | None]:
        port = self._rules.container.container_port
        if policy.network_mode != "none":
            return super()._network(policy)[0], port
        self._networks.make(self._closed_network, internal=True)
        return self._closed_network, port


class _NothingOfOurs(Programs):
    """The programs of images that bring their own."""

    def __init__(self) -> None:
        pass

    def of(self, image_id: str, image: str, run_root: Path) -> Program:
        return Program()


class _AioStarter(Starter):
    """Starts containers whose own server is waited for."""

    def __init__(
        self, engine: Engine, ways: Ways, host_uid: int | None, timeout_s: float, waiter: Waiter, token: str | None
    ) -> None:
        super().__init__(engine, ways, host_uid, timeout_s)
        self._waiter = waiter
        self._token = token

    def start(self, plan: SandboxPlan, launch: Launch) -> Sandbox:
        hostname = launch.name.rpartition("-")[2]
        with ExitStack() as undo:
            os.close(local_dirs.open_user_data(plan.user_data, self._host_uid))
            place = Place(
                labels=launch.labels,
                binds=(
                    Bind(str(plan.user_data), USER_DATA, read_only=False),
                    *(Bind(str(host), target, read_only) for host, target, read_only in plan.mounts),
                ),
                entrypoint=(),
                network=launch.network,
                cgroup_v2=self._engine.facts.cgroup_v2,
            )
            with self._engine.starting():
                container = self._engine.create(launch.name, aio_body(launch.policy, place, hostname=hostname))
                undo.callback(self._discard, container)
                self._engine.start(container)
            state = self._running(container)
            vital = Vital(self._engine, container, open_pidfd(int(state["State"].get("Pid") or 0), container))
            undo.callback(vital.close)
            assert launch.port is not None
            endpoint = AioEndpoint(address_in(state, launch.network), launch.port, hostname.encode(), self._token)
            connection = AioConnection(
                endpoint,
                sandbox_id=plan.sandbox_id,
                liveness=lambda: vital.look(_DYING_S),
                waiter=self._waiter,
                dialect=AioDialect(launch.env),
            )
            undo.callback(connection.close)
            self._wait_for_server(connection, container, vital)
            undo.pop_all()
        ticket = ticket_of(plan, launch, state, key=b"", token=self._token)
        return Sandbox(ticket, connection, vital, plan.sandbox_id)

    def _wait_for_server(self, connection: AioConnection, container: str, vital: Vital) -> None:
        """Ask until the server says that it is ready.

        Raises:
            StartFailed: The container ended, or never said so in time.
        """
        deadline, problem = time.monotonic() + self._timeout_s, "no answer"
        while time.monotonic() < deadline:
            try:
                answer = connection.perform(Operation(new_op_id(), "health", {}), _ASK_S)
                if answer.error is None:
                    return
                problem = str(answer.error)
            except TimeoutError:
                problem = f"no answer within {_ASK_S:g} s"
            if vital.look() is Liveness.DEAD:
                found = self._engine.inspect(container)
                how = how_it_ended(None if found is None else found.get("State"))
                raise StartFailed(f"the image's server did not start: its container {how}", reason="died")
            time.sleep(_PAUSE_S)
        raise StartFailed(
            f"the image's server did not become ready within {self._timeout_s:g} s ({problem}); is it an AIO image, "
            "and container_port its port?",
            reason="not_ready",
        )
