"""The ways into a container: by its socket, by its port, or by ``docker exec``. None is open before it is proved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sandfleet.backends import Liveness, Operation
from sandfleet.errors import StartFailed
from sandfleet.ids import new_op_id
from sandfleet_workers.backends.docker.engine import Engine
from sandfleet_workers.backends.docker.exec_connection import ExecConnection
from sandfleet_workers.backends.docker.sandbox import Vital
from sandfleet_workers.backends.docker.ticket import Ticket
from sandfleet_workers.endpoint import EndpointConnection
from sandfleet_workers.endpoint_socket import Endpoint, TcpEndpoint, UnixEndpoint
from sandfleet_workers.waiter import Waiter

__all__ = ["SOCKET", "Ways", "address_in", "problem_with"]

#: Of sandboxd, in the run directory.
SOCKET = "s"
#: How long "nobody listens" may take to turn into "it is dead".
_DYING_S = 0.5


class Ways:
    """Makes the connections of one node's containers.

    Args:
        engine: Where they run.
        waiter: The node's.
        host_uid: Who sandboxes are on the host; None where that is the worker itself.
    """

    def __init__(self, engine: Engine, waiter: Waiter, host_uid: int | None) -> None:
        self._engine = engine
        self._waiter = waiter
        self._host_uid = host_uid

    def into(
        self, sandbox_id: str, ticket: Ticket, state: Mapping[str, Any], run_fd: int, vital: Vital
    ) -> EndpointConnection | ExecConnection:
        """The way into a running container; nothing is asked of it yet.

        Args:
            sandbox_id: For errors.
            ticket: What is known of it.
            state: What the engine tells of it.
            run_fd: Its run directory, pinned; the caller closes it.
            vital: Whether it lives.

        Raises:
            StartFailed: It has no address.
        """

        def liveness() -> Liveness:
            return vital.look(_DYING_S)

        if ticket.transport == "exec":
            return ExecConnection(
                self._engine,
                ticket.container,
                sandbox_id=sandbox_id,
                uid=ticket.user,
                env=ticket.env,
                liveness=liveness,
            )
        key = bytes.fromhex(ticket.key)
        endpoint: Endpoint
        if ticket.port is None:
            uid = os.geteuid() if self._host_uid is None else self._host_uid
            endpoint = UnixEndpoint(os.dup(run_fd), SOCKET, key, uid=uid, pid=ticket.pid or None)
        else:
            endpoint = TcpEndpoint(address_in(state, ticket.network), ticket.port, key, ticket.token)
        return EndpointConnection(endpoint, sandbox_id=sandbox_id, liveness=liveness, waiter=self._waiter)


def problem_with(way: EndpointConnection | ExecConnection, timeout_s: float) -> str:
    """What keeps the other end from answering and proving itself, waited for so long; nothing when it does."""
    try:
        answer = way.perform(Operation(new_op_id(), "health", {}), timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    return str(answer.error) if answer.error is not None else ""


def address_in(state: Mapping[str, Any], network: str) -> str:
    """The container's address there.

    Raises:
        StartFailed: It has none.
    """
    networks = (state.get("NetworkSettings") or {}).get("Networks") or {}
    there: Mapping[str, Any] = networks.get(network) or next(iter(networks.values()), {})
    address = str(there.get("IPAddress") or (state.get("NetworkSettings") or {}).get("IPAddress") or "")
    if not address:
        raise StartFailed(f"the container got no address in network {network}", reason="no_network")
    return address
