"""The Celery tasks of a node. Their bodies run after the fact: `LanePool` has the outcome already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Celery, Task

from sandfleet.errors import OperationFailed
from sandfleet.ops import OPS, task_name
from sandfleet_workers.node import CHECKPOINTS, LIFECYCLE
from sandfleet_workers.pool import outcome_of

__all__ = ["OperationTask", "register"]

if TYPE_CHECKING:
    _Task = Task[Any, Any]  # generic in the stubs only
else:
    _Task = Task


class OperationTask(_Task):
    """One operation. `LanePool` gives tasks of this class lanes and two phases."""

    abstract = True
    is_operation = True
    acks_late = False
    max_retries = 0
    typing = False
    Request = "sandfleet.task_request:FleetRequest"
    #: A failed operation is an answer, not a fault of the worker: Celery logs it without a traceback.
    throws = (OperationFailed,)

    def run(self, *_args: Any, **_kwargs: Any) -> Any:
        return outcome_of(str(self.request.id))


def register(app: Celery) -> None:
    """Register every operation and lifecycle task."""
    for name in [*(task_name(kind) for kind in OPS), *sorted(LIFECYCLE), CHECKPOINTS]:
        kind = type(name.replace(".", "_"), (OperationTask,), {"name": name, "__module__": __name__})
        app.register_task(kind())
