"""The Docker backend: a node's containers, from their start to their removal."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from sandfleet.backends import Capability, Connection, Finding, Liveness, Operation, SandboxBackend, SandboxPlan
from sandfleet.config import Settings
from sandfleet.errors import ConfigError, StartFailed
from sandfleet.ids import new_op_id
from sandfleet.model import SandboxSpec
from sandfleet_workers import sandboxd
from sandfleet_workers.backends import local_dirs
from sandfleet_workers.backends.docker.attaching import Attacher
from sandfleet_workers.backends.docker.engine import Engine
from sandfleet_workers.backends.docker.examine import examine
from sandfleet_workers.backends.docker.holding import Holding, told
from sandfleet_workers.backends.docker.host import check_paths, may_see_others, sandbox_user
from sandfleet_workers.backends.docker.hostconfig import (
    LABEL_BACKEND,
    LABEL_DATA_ROOT,
    LABEL_DEPLOYMENT,
    LABEL_NODE,
    LABEL_SLOT,
    LABEL_SPEC,
    Place,
    container_body,
)
from sandfleet_workers.backends.docker.images import Images
from sandfleet_workers.backends.docker.networks import Networks
from sandfleet_workers.backends.docker.policy import DEFAULT_IMAGE, NodeRules, Policy, check_rules, digest_of, resolve
from sandfleet_workers.backends.docker.program import Probe, Programs
from sandfleet_workers.backends.docker.sandbox import Sandbox
from sandfleet_workers.backends.docker.starting import Launch, Starter
from sandfleet_workers.backends.docker.ticket import Ticket
from sandfleet_workers.backends.docker.ways import Ways
from sandfleet_workers.node_identity import data_id
from sandfleet_workers.waiter import Waiter, shared_waiter

__all__ = ["DockerBackend"]

log = logging.getLogger("sandfleet.node")

_PROBE_S = 2.0
_START_S = 30.0
#: A container that no node was connected to for so long ends by itself: its fleet does not come back.
_ORPHAN_S = 1800.0
#: How long a node that is stopped waits for what it is starting, and then for that to fail.
_STARTED_WITHIN_S = 5.0


class DockerBackend(SandboxBackend):
    """Sandboxes in containers of a Docker engine: `hostconfig` says what each may, `policy` what callers may ask.

    Raises:
        ConfigError: The engine does not answer, or cannot keep what the settings promise.
    """

    name: ClassVar[str] = "docker"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(Capability)
    isolation: ClassVar[str] = "container (shares the host kernel unless its runtime does not)"
    default_image: ClassVar[str] = DEFAULT_IMAGE

    def __init__(self, settings: Settings, on_death: Callable[[str, str], None], waiter: Waiter | None = None) -> None:
        super().__init__(settings, on_death)
        container = settings.container
        if settings.node_id is None:
            raise ConfigError("containers need a node id for their labels", key="node_id")
        self._node_id = settings.node_id
        self._data_id = data_id(settings.data_root)
        self._lock = threading.Condition()
        #: Names of containers that are being started.
        self._starting: set[str] = set()
        self._closing = False
        self._waiter = waiter or shared_waiter()
        try:
            self._engine = Engine(container.docker_host, starts=settings.start_concurrency)
        except StartFailed as exc:
            raise ConfigError(exc.message, key="sandbox.docker_host") from exc
        try:
            self._open(settings)
        except BaseException:
            self._engine.close()
            raise
        # The last, for it starts threads.
        self._holding = Holding(self._engine, self._waiter, self._labels, self._died)

    def _open(self, settings: Settings) -> None:
        container, facts = settings.container, self._engine.facts
        user, self._host_uid = sandbox_user(container.container_user, facts)
        self._rules = NodeRules(
            container, user, settings.nofile, settings.tmp_bytes, facts.runtimes, self.default_image
        )
        check_rules(self._rules)
        self._images = Images(self._engine, container)
        self._networks = Networks(self._engine, container, settings.data_root, self._data_id)
        self._ways = Ways(self._engine, self._waiter, self._host_uid)
        self._attacher = Attacher(self._engine, self._ways, self._labels, settings.run_root)
        start_s, orphan_s = max(settings.start_timeout_s, _START_S), max(_ORPHAN_S, 3 * settings.detach_s)
        self._starter = Starter(self._engine, self._ways, self._host_uid, start_s, orphan_s)
        directory = settings.data_root / "nodes" / self._node_id / "sandboxd"
        self._programs = Programs(self._engine, directory, self._host_uid, self._probe_image, self._labels)
        #: A worker in a container of its own does not reach the addresses of other containers.
        self._elsewhere = may_see_others(self._engine.address)
        if self._elsewhere:
            self._check_paths()

    @classmethod
    def check(cls) -> list[str]:
        if not sys.platform.startswith("linux"):
            return ["nodes with containers need Linux; run the worker on a Linux machine"]
        return []

    @classmethod
    def examine(cls, settings: Settings) -> list[Finding]:
        return examine(settings, settings.container.image or cls.default_image)

    @property
    def host_uid(self) -> int | None:
        """Who sandboxes are on the host; None where that is the worker itself."""
        return self._host_uid

    @property
    def _labels(self) -> dict[str, str]:
        return {LABEL_BACKEND: self.name, LABEL_DEPLOYMENT: self._data_id, LABEL_NODE: self._node_id}

    def _labels_of(self, slot: str, spec: str) -> dict[str, str]:
        root = str(self.settings.data_root.absolute())  # whoever finds it can tell whether its node still runs
        return {**self._labels, LABEL_SLOT: slot, LABEL_SPEC: spec, LABEL_DATA_ROOT: root}

    # --- the contract --------------------------------------------------------------------------

    def digest(self, spec: SandboxSpec) -> str:
        policy = self._policy(spec)
        settings = self.settings
        mounts = [(str(each.host_path), each.container_path, each.read_only) for each in settings.mounts]
        if settings.skills_path is not None:
            mounts.append((str(settings.skills_path), settings.skills_container_path, True))
        return digest_of(
            policy,
            env=self._env(spec, policy),
            mounts=mounts,
            image_id=self._images.id_of(policy.image),
            program=sandboxd.digest(),
        )

    def create(self, plan: SandboxPlan) -> Connection:
        self.destroy(plan.sandbox_id)
        policy = self._policy(plan.spec)
        image_id = self._images.ensure(policy.image)
        program = self._programs.of(image_id, policy.image, plan.run_dir.parent)
        network, port = self._network(policy)
        slot = plan.sandbox_id if plan.identity is None else secrets.token_hex(8)
        with self._named(slot) as name:
            launch = Launch(
                name=name,
                labels=self._labels_of(slot, self.digest(plan.spec)),
                policy=replace(policy, image=image_id),
                image=policy.image,
                program=program,
                network=network,
                port=port,
                env=self._env(plan.spec, policy),
            )
            try:
                sandbox = self._starter.start(plan, launch)
            except StartFailed as exc:
                if exc.facts.get("reason") == "no_image":
                    self._images.forget(policy.image)  # somebody removed it a moment ago
                raise
            self._hold(sandbox)
        return sandbox.connection

    def _hold(self, sandbox: Sandbox) -> None:
        if not self._holding.add(sandbox):
            self._starter.undo(sandbox)
            raise StartFailed("the node is being stopped", reason="closing")

    def claim(self, blank_id: str, sandbox_id: str) -> Connection:
        sandbox = self._holding.get(blank_id)
        if sandbox is None or sandbox.vital.ended():
            raise StartFailed(f"there is no blank sandbox {blank_id} any more", reason="blank_gone")
        # What a returning thread brought may belong to the user it had elsewhere; a link leads to it from the slot.
        os.close(local_dirs.open_user_data(Path(os.path.realpath(sandbox.ticket.user_data)), self._host_uid))
        if not self._holding.rename(sandbox, sandbox_id):
            raise StartFailed(f"blank sandbox {blank_id} ended, or {sandbox_id} runs already", reason="blank_gone")
        return sandbox.connection

    def ticket(self, sandbox_id: str) -> dict[str, Any]:
        """As of `SandboxBackend`; ``name`` in it is what `remove_leftover` takes. With ``docker exec`` the
        environment of commands comes on top, however large it is."""
        return self._held(sandbox_id).ticket.to_wire()

    def attach(self, sandbox_id: str, ticket: Mapping[str, Any]) -> Connection:
        wanted = Ticket.from_wire(ticket)
        with self._busy_with(wanted.name):
            if self._holding.get(sandbox_id) is not None or wanted.name in self._holding.names():
                raise StartFailed(f"sandbox {sandbox_id} is held already", reason="unreachable")
            sandbox = self._attacher.attach(sandbox_id, wanted)
            if not self._holding.add(sandbox):
                sandbox.connection.close()
                sandbox.vital.release()
                raise StartFailed("the node is being stopped", reason="unreachable")
        return sandbox.connection

    def outdated(self) -> list[str]:
        """As of `SandboxBackend`: the engine is asked for each image, once."""
        held = self._holding.tickets()
        now = {image: self._images.look(image) for image in {ticket.image for ticket in held.values()}}
        # An image that is gone was not replaced: there is nothing newer to start.
        return [sandbox_id for sandbox_id, ticket in held.items() if now[ticket.image] not in ("", ticket.image_id)]

    def destroy(self, sandbox_id: str) -> None:
        self._holding.end(sandbox_id)

    def probe(self, sandbox_id: str) -> Liveness:
        sandbox = self._holding.get(sandbox_id)
        if sandbox is None or sandbox.vital.ended():
            return Liveness.DEAD
        try:
            answer = sandbox.connection.perform(Operation(new_op_id(), "health", {}), _PROBE_S)
        except TimeoutError:
            answer = None
        if answer is not None and answer.error is None:
            return Liveness.ALIVE
        return Liveness.DEAD if sandbox.vital.look() is Liveness.DEAD else Liveness.UNKNOWN

    def running(self) -> list[str]:
        return self._holding.ids()

    def leftovers(self) -> dict[str, list[str]]:
        with told("list containers"):
            there = self._engine.labelled({LABEL_BACKEND: self.name, LABEL_DEPLOYMENT: self._data_id})
        found: dict[str, list[str]] = {}
        ours = self._ours()
        for each in there:
            name = str((each.get("Names") or [each.get("Id")])[0]).lstrip("/")
            if name not in ours:
                found.setdefault(each["Labels"].get(LABEL_NODE, ""), []).append(name)
        return found

    def remove_leftover(self, name: str) -> None:
        with told(f"remove {name}"):
            there = self._engine.inspect(name)
            labels = {} if there is None else there.get("Config", {}).get("Labels") or {}
            if there is None or name in self._ours() or labels.get(LABEL_DEPLOYMENT) != self._data_id:
                return
            self._engine.remove(str(there["Id"]))
        log.info("leftover.removed", extra={"container": name, "node": labels.get(LABEL_NODE, "")})

    def detach(self) -> None:
        self._holding.detach()
        self._end_starts()

    def close(self) -> None:
        self._end_starts()
        self._holding.close()
        if self._own_networks:
            self._networks.drop(self._own_networks)
        self._engine.close()

    # --- for those who know it is Docker -------------------------------------------------------

    def transport_of(self, sandbox_id: str) -> str:
        """How the node reaches a sandbox: ``unix``, ``tcp`` or ``exec`` (no Python in its image, so it is slower).

        Raises:
            KeyError: No such sandbox runs.
        """
        return self._held(sandbox_id).ticket.transport

    def container_of(self, sandbox_id: str) -> str:
        """The id of a sandbox's container.

        Raises:
            KeyError: No such sandbox runs.
        """
        return self._held(sandbox_id).ticket.container

    def pid_of(self, sandbox_id: str) -> int:
        """Its process 1, as the engine's host numbers it.

        Raises:
            KeyError: No such sandbox runs.
        """
        return self._held(sandbox_id).ticket.pid

    def _held(self, sandbox_id: str) -> Sandbox:
        if (sandbox := self._holding.get(sandbox_id)) is None:
            raise KeyError(sandbox_id)
        return sandbox

    # --- what a container is made from ---------------------------------------------------------

    def _policy(self, spec: SandboxSpec) -> Policy:
        return resolve(self._rules, spec.image, spec.options)

    def _env(self, spec: SandboxSpec, policy: Policy) -> dict[str, str]:
        proxy = self._rules.container.http_proxy
        names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
        own = dict.fromkeys(names, proxy) if proxy and policy.network_mode == "full" else {}
        return {**own, **spec.env}

    @property
    def _own_networks(self) -> tuple[str, ...]:
        container = self._rules.container
        used = container.network_mode == "full" or "network_mode" in container.allowed_options
        return (self._networks.own,) if used else ()

    def _network(self, policy: Policy) -> tuple[str, int | None]:
        """The engine's network for it, and where sandboxd listens there."""
        if policy.network_mode == "none":
            return "none", None
        return self._networks.with_a_way_out(), None if self._elsewhere else self._rules.container.container_port

    def _ours(self) -> set[str]:
        """Names of containers that somebody here holds, starts or removes."""
        with self._lock:
            starting = set(self._starting)
        return starting | self._holding.names()

    def _died(self, sandbox_id: str, reason: str) -> None:
        self.on_death(sandbox_id, reason)

    @contextmanager
    def _named(self, slot: str) -> Iterator[str]:
        """The name of a container that is being started; meanwhile it is nobody's leftover."""
        name = f"{self._rules.container.container_prefix}-{self._data_id[:8]}-{self._node_id}-{slot}"
        with self._busy_with(name):
            yield name

    @contextmanager
    def _busy_with(self, name: str) -> Iterator[None]:
        with self._lock:
            if self._closing:
                raise StartFailed("the node is being stopped", reason="closing")
            self._starting.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._starting.discard(name)
                self._lock.notify_all()

    def _end_starts(self) -> None:
        """Nothing is started from now on; what is being started is held soon, or is made to fail."""
        with self._lock:
            self._closing = True
            if self._lock.wait_for(lambda: not self._starting, _STARTED_WITHIN_S):
                return
            names = list(self._starting)
        for name in names:
            try:
                self._engine.remove(name)
            except StartFailed as exc:
                log.warning("container.not_removed", extra={"container": name, "error": str(exc)})
        with self._lock:
            self._lock.wait_for(lambda: not self._starting, _STARTED_WITHIN_S)

    def _probe_image(self, probe: Probe, timeout_s: float) -> int | None:
        slot = secrets.token_hex(8)
        policy = replace(resolve(self._rules, "", {}), image=probe.image, preset="strict", network_mode="none")
        place = Place(self._labels_of(slot, "probe"), probe.binds, probe.argv, cgroup_v2=self._engine.facts.cgroup_v2)
        with self._named(slot) as name:
            return self._starter.probe(name, container_body(policy, place), timeout_s)

    def _check_paths(self) -> None:
        settings = self.settings
        try:
            image_id = self._images.ensure(self._rules.image)
            check_paths(
                settings.data_root,
                settings.run_root,
                image_id=image_id,
                host_uid=self._host_uid,
                run=self._probe_image,
            )
        except StartFailed as exc:
            raise ConfigError(f"it cannot be seen whether Docker shares this worker's directories: {exc}") from exc
