"""What a worker of ours tells of the tasks it holds: lines for people, never contents, secrets or environment values.

Celery shows a task in three places: the ``task-received`` event, ``inspect active`` (Flower's page of a worker) and the
failure. Left alone the second dumps all arguments, and the first whatever the sender put there.
"""

from __future__ import annotations

from typing import Any

from celery.worker import request as celery_request

from sandfleet.errors import OperationFailed
from sandfleet.ids import is_sandbox_id
from sandfleet.ops import OPS
from sandfleet.wire import shown_owner

__all__ = ["FleetRequest", "PlainRequest", "shown_call"]

_Request: Any = celery_request.Request  # the stubs know half of it
_OURS = f"{OperationFailed.__module__}.{OperationFailed.__qualname__}: "


class FleetRequest(_Request):  # type: ignore[misc]  # for that reason
    """Any task of a node or scheduler: it is listed by its line, and a refusal has no traceback."""

    def info(self, safe: bool = False) -> dict[str, Any]:
        """Celery's description of the task, always with the lines instead of the arguments."""
        told: dict[str, Any] = super().info(safe=True)
        return told

    def send_event(self, type: str, **fields: Any) -> None:  # noqa: A002  (Celery's name)
        """As Celery's; where in our code an operation was refused says nothing to whoever reads Flower."""
        trace = fields.get("traceback")
        if type == "task-failed" and trace is not None and _is_answer(str(trace)):
            fields["traceback"] = ""
        result = fields.get("result")
        if isinstance(result, str) and len(result) > 1 and result[0] == result[-1] == "'":
            fields["result"] = result[1:-1]  # a few words of ours: people need no quotes around them
        super().send_event(type, **fields)


class PlainRequest(FleetRequest):
    """A plain caller's task. The sender's own Celery made its lines of the raw arguments: they are made anew."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            positional, call, _ = self._payload
        except Exception:  # noqa: BLE001  (whatever somebody's message may raise; the task itself will tell)
            positional, call = (), {}
        shown = shown_call(str(self._type).partition(".")[2], positional, call)
        # The tracer reads them from the request's dictionary.
        self._argsrepr, self._kwargsrepr = shown
        self._request_dict["argsrepr"], self._request_dict["kwargsrepr"] = shown


def shown_call(kind: str, args: Any, kwargs: Any) -> tuple[str, str]:
    """What Flower shows as (args, kwargs) of a plain call: ``("bash: ls -la", "thread alice")``."""
    op = OPS.get(kind)
    if op is None or args or not isinstance(kwargs, dict):
        return "(not a call of ours)", ""
    try:
        line = op.describe(kwargs)
    except (TypeError, ValueError):  # arguments of the wrong types, which the gateway refuses in a moment
        line = kind
    sandbox_id = kwargs.get("sandbox_id")
    where = f" · {sandbox_id[:12]}" if isinstance(sandbox_id, str) and is_sandbox_id(sandbox_id) else ""
    return line + where, shown_owner([kwargs.get("user_id"), kwargs.get("thread_id")])


def _is_answer(trace: str) -> bool:
    """Whether the traceback ends in an error that is the operation's answer."""
    return any(line.startswith(_OURS) for line in trace.splitlines()[-1:]) or f"\n{_OURS}" in trace
