"""Record an operation and publish its task: in one script, or (when asked) with kombu's own publish."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from sandfleet.config import Settings
from sandfleet.errors import NotStarted
from sandfleet.store.base import OpRecord, Push, Recorded, Store
from sandfleet.wire import celery_message, shown_owner

__all__ = ["publisher"]

#: (record, task name, wire argument, queue, max_inflight) -> Recorded
Publish = Callable[[OpRecord, str, Mapping[str, Any], str, int], Recorded]


def publisher(settings: Settings, store: Store) -> Publish:
    """How this process publishes, by ``settings.publish``.

    ``script``: the Celery message is LPUSHed by the very script that records the operation, so there is no
    state in which one exists without the other. ``kombu``: needed when broker and state are different servers.
    """
    return _by_kombu(settings, store) if settings.publish == "kombu" else _by_script(store)


def _by_script(store: Store) -> Publish:
    def publish(record: OpRecord, task: str, argument: Mapping[str, Any], queue: str, max_inflight: int) -> Recorded:
        headers: dict[str, Any] = {"id": record.op_id, "task": task}
        # Whoever listens has imported Celery's signals; an agent backend without Celery does not pay for them.
        signals = sys.modules.get("celery.signals")
        if signals is not None and signals.before_task_publish.receivers:
            # Tracing libraries add their headers here, as they do for Celery's own publish.
            signals.before_task_publish.send(
                sender=task,
                body=((argument,), {}, {}),
                exchange="",
                routing_key=queue,
                headers=headers,
                properties={"correlation_id": record.op_id},
                declare=[],
                retry_policy=None,
            )
        message = celery_message(task, record.op_id, argument, queue=queue, describe=record.describe, headers=headers)
        return store.record(record, Push(queue, message), max_inflight=max_inflight)

    return publish


def _by_kombu(settings: Settings, store: Store) -> Publish:
    from sandfleet.celery_app import celery_app, queue_of  # noqa: PLC0415  (an app only where it is used)

    app = celery_app(settings)

    def publish(record: OpRecord, task: str, argument: Mapping[str, Any], queue: str, max_inflight: int) -> Recorded:
        recorded = store.record(record, None, max_inflight=max_inflight)
        if recorded.status != "recorded":
            return recorded
        try:
            app.send_task(
                task,
                args=[argument],
                task_id=record.op_id,
                queue=queue_of(queue),  # type: ignore[arg-type]  # Celery takes a Queue
                ignore_result=True,
                argsrepr=record.describe,
                kwargsrepr=shown_owner(argument.get("owner")) or "{}",
                retry=False,
            )
        except Exception as exc:
            # Whether the broker got it is unknown; the tombstone makes sure that it does not run from now on.
            view = store.cancel(record.op_id)
            if view is not None and view.state in ("claimed", "done"):
                return recorded
            why = f"the broker did not take {task} {record.op_id}: {exc}"
            raise NotStarted(why, op_id=record.op_id, retry_after_s=0.5) from exc
        return recorded

    return publish
