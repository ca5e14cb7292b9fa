"""Celery's remote control, as the command line and the stack use it: who answers, end this, drain that."""

from __future__ import annotations

from typing import Any

from sandfleet.config import Settings
from sandfleet.errors import StoreUnavailable

__all__ = ["ping", "revoke", "tell_to_drain", "worker_name"]


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


def tell_to_drain(settings: Settings, name: str, *, timeout_s: float = 2.0) -> bool:
    """Ask one node's worker to drain and leave; False when it did not answer."""
    return bool(_broadcast(settings, "drain", {}, [name], timeout_s))


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
