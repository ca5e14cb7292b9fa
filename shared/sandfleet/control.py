"""Celery's remote control, as the command line and the stack use it: who answers, end this, drain that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandfleet.config import Settings
from sandfleet.errors import StoreUnavailable

__all__ = ["ping", "revoke", "tell_to_collect", "tell_to_drain", "worker_name"]


def worker_name(node_id: str, host: str) -> str:
    """What a node's Celery worker is called."""
    return f"{node_id}@{host}"


def ping(settings: Settings, names: list[str] | None = None, *, timeout_s: float = 1.0) -> list[str]:
    """The workers (nodes and schedulers) whose main loop answers; with ``names``, only these are asked."""
    answers = _broadcast(settings, "ping", {}, names, timeout_s)
    return sorted(name for answer in answers for name in answer)


def revoke(settings: Settings, op_id: str, names: list[str] | None = None, *, timeout_s: float = 1.0) -> int:
    """Tell the workers (with ``names``, only these) to end the operation; how many answered."""
    arguments = {"task_id": op_id, "terminate": True, "signal": "SIGTERM"}
    return len(_broadcast(settings, "revoke", arguments, names, timeout_s))


def tell_to_drain(settings: Settings, name: str, *, within_s: float | None = None, timeout_s: float = 2.0) -> bool:
    """Ask one node's worker to drain and leave; False when it did not answer.

    Args:
        within_s: How long what runs there gets to finish; the node's ``drain_timeout_s`` by default.
    """
    # A node of the version before takes no such argument.
    arguments = {} if within_s is None else {"timeout_s": within_s}
    return bool(_broadcast(settings, "drain", arguments, [name], timeout_s))


def tell_to_collect(
    settings: Settings, name: str, rules: Mapping[str, Any], *, reply_to: str, request: str, timeout_s: float = 2.0
) -> bool:
    """Ask one node's worker for a ``gc`` by these rules, the answer to the stream ``reply_to``; False when it does not
    answer or knows no such thing."""
    arguments = {**rules, "reply_to": reply_to, "request": request}
    answers = _broadcast(settings, "gc", arguments, [name], timeout_s)
    return any("ok" in told for answer in answers for told in answer.values())


def _broadcast(
    settings: Settings, command: str, arguments: dict[str, Any], names: list[str] | None, timeout_s: float
) -> list[dict[str, Any]]:
    # Celery takes a third of a second to import, and most commands do without it.
    from sandfleet.celery_app import celery_app  # noqa: PLC0415

    app = celery_app(settings, name="sandfleet-control")
    try:
        answers = app.control.broadcast(command, arguments=arguments, destination=names, reply=True, timeout=timeout_s)
    except Exception as exc:
        if not isinstance(exc, tuple(app.connection_for_write().connection_errors)):
            raise
        raise StoreUnavailable(f"Redis did not carry the control message: {exc}") from exc
    finally:
        app.close()
    return list(answers or [])
