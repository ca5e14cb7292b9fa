"""What a command carries with it into its sandbox, so that a node's next run can answer for it. Pure.

What comes back was kept by the sandbox, so it is hostile: of all that it says only what shapes the answer is believed,
and never whose it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sandfleet.errors import SandfleetError
from sandfleet.ids import Identity
from sandfleet.op_args import MAX_OUTPUT_BYTES
from sandfleet.store.base import OpView, Route
from sandfleet.wire import OpMessage

__all__ = ["message_of"]

_MOST_BYTES = 4096
#: What the answer to a command depends on.
_KEPT = ("max_output_bytes", "as_bytes", "background", "stream", "session")


def message_of(view: OpView, route: Route, identity: Identity, note: str) -> OpMessage:
    """The message of an operation that an earlier run of this node began, as far as its answer needs it.

    Args:
        view: Its record.
        route: Of its sandbox now.
        identity: Whose sandbox it is.
        note: What the sandbox kept with it; believed if it is about this very operation of this very sandbox.
    """
    noted = _noted(note)
    lanes: tuple[str, ...] = ()
    args: Mapping[str, Any] = {}
    beside = False
    if noted is not None and _key(noted) == (view.op_id, view.kind, route.sandbox_id, identity):
        lanes, beside = noted.lanes, noted.beside
        args = {name: noted.args[name] for name in _KEPT if name in noted.args}
    elif view.kind != "execute_command":
        lanes = (f"{route.sandbox_id}/files",)
    else:
        # As much as it may have been asked to keep.
        args = {"max_output_bytes": MAX_OUTPUT_BYTES}
    return OpMessage(
        op_id=view.op_id,
        kind=view.kind,
        identity=identity,
        route=route,
        lanes=lanes,
        args=args,
        content=None,
        start_by_ms=view.recorded_at_ms,
        deadline_ms=view.deadline_ms,
        reply_to=view.reply_to,
        sent_at_ms=view.recorded_at_ms,
        beside=beside,
    )


def _noted(note: str) -> OpMessage | None:
    if not note or len(note) > _MOST_BYTES:
        return None
    try:
        return OpMessage.from_wire(json.loads(note))
    except (SandfleetError, ValueError, TypeError, RecursionError):
        return None


def _key(message: OpMessage) -> tuple[str, str, str, Identity]:
    return message.op_id, message.kind, message.route.sandbox_id, message.identity
