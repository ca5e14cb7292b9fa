"""The messages of sandfleet: operations, replies, and the Celery envelope around an operation.

Version 1. A reader accepts its own version and the one before; unknown keys are ignored. The envelope
is Celery's task protocol 2 as kombu's Redis transport writes it (a contract test compares the two), so
that any Celery worker, Flower and `revoke` understand it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sandfleet.errors import InvalidArgument, VersionMismatch
from sandfleet.ids import Identity, check_op_id, is_sandbox_id, new_token
from sandfleet.store.base import Route

__all__ = [
    "OPS_QUEUE",
    "SCHEDULER_QUEUE",
    "VERSION",
    "WAITING_QUEUE",
    "OpMessage",
    "celery_message",
    "decode_content",
    "encode_content",
    "node_queue",
    "put_beside",
    "queue_names",
    "shown_owner",
    "take_beside",
]

VERSION = 1
SCHEDULER_QUEUE = "sandfleet.scheduler"
OPS_QUEUE = "sandfleet.ops"
#: Plain calls whose sandbox is not there yet go round in it.
WAITING_QUEUE = "sandfleet.ops.waiting"

_ORIGIN_HOST = socket.gethostname()
_STREAMS = ("stdout", "stderr")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def node_queue(node_id: str) -> str:
    """The queue of a node."""
    return f"sandfleet.node.{node_id}"


def queue_names(node_ids: Iterable[str]) -> list[str]:
    """Every queue messages may wait in: the shared ones, and each node's."""
    return [SCHEDULER_QUEUE, OPS_QUEUE, WAITING_QUEUE, *map(node_queue, node_ids)]


@dataclass(frozen=True, slots=True)
class OpMessage:
    """An operation on its way to a node: the single positional argument of its Celery task.

    ``content`` is in wire form (see `encode_content`). ``start_by_ms`` and ``deadline_ms`` are
    milliseconds of the store's clock; ``sent_at_ms`` likewise, for timings. ``lanes`` is what must not interleave
    with it (`sandfleet.ops.lanes_of`), from the client because its arguments may travel as a blob. ``beside``: the
    client understands big output that comes beside the JSON (see `put_beside`); those before it do not say so.
    """

    op_id: str
    kind: str
    identity: Identity
    route: Route
    lanes: tuple[str, ...]
    args: Mapping[str, Any]
    content: Mapping[str, Any] | None
    start_by_ms: int
    deadline_ms: int
    reply_to: str
    sent_at_ms: int
    beside: bool = False

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "v": VERSION,
            "op": self.op_id,
            "kind": self.kind,
            "owner": [self.identity.user_id, self.identity.thread_id],
            "sid": self.route.sandbox_id,
            "node": self.route.node_id,
            "inc": self.route.incarnation,
            "epoch": self.route.epoch,
            "lanes": list(self.lanes),
            "args": self.args,
            "content": self.content,
            "start_by": self.start_by_ms,
            "deadline": self.deadline_ms,
            "reply": self.reply_to,
            "sent": self.sent_at_ms,
            **({"beside": True} if self.beside else {}),
        }

    @classmethod
    def from_wire(cls, data: object) -> OpMessage:
        """The message of its JSON form, which may come from anyone who reaches the broker.

        Raises:
            VersionMismatch: Neither this version nor the one before.
            InvalidArgument: Names the field.
        """
        if not isinstance(data, dict):
            raise InvalidArgument("an operation message must be a JSON object")
        if data.get("v") not in (VERSION, VERSION - 1):
            raise VersionMismatch(f"message version {data.get('v')!r}; this node speaks {VERSION} and {VERSION - 1}")
        owner = data.get("owner")
        if not isinstance(owner, list) or len(owner) != 2:
            raise InvalidArgument("field owner must be [user_id, thread_id]")
        sandbox_id = data.get("sid")
        if not is_sandbox_id(sandbox_id):
            raise InvalidArgument("field sid is not a sandbox id")
        args, content = data.get("args"), data.get("content")
        if not isinstance(args, dict) or not (content is None or isinstance(content, dict)):
            raise InvalidArgument("fields args and content must be objects")
        return cls(
            op_id=check_op_id(data.get("op")),
            kind=_text(data, "kind"),
            identity=Identity(owner[1], owner[0]),
            route=Route(_text(data, "sid"), _text(data, "node"), _text(data, "inc"), _int(data, "epoch")),
            lanes=_lanes(data, str(sandbox_id)),
            args=args,
            content=content,
            start_by_ms=_int(data, "start_by"),
            deadline_ms=_int(data, "deadline"),
            reply_to=_text(data, "reply"),
            sent_at_ms=_int(data, "sent"),
            beside=data.get("beside") is True,
        )


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str) or len(value) > 200:
        raise InvalidArgument(f"field {key} must be a string of at most 200 characters")
    return value


def _lanes(data: Mapping[str, Any], sandbox_id: str) -> tuple[str, ...]:
    """The lanes a client asks for: its own order is its own affair, other sandboxes' lanes are not."""
    lanes = data.get("lanes")
    if not isinstance(lanes, list) or len(lanes) > 256:
        raise InvalidArgument("field lanes must be a list of at most 256 lanes")
    for lane in lanes:
        if not isinstance(lane, str) or len(lane) > 256 or not lane.startswith(sandbox_id + "/"):
            raise InvalidArgument(f"field lanes: {str(lane)[:80]!r} is no lane of sandbox {sandbox_id}")
    return tuple(sorted(set(lanes)))


def _int(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise InvalidArgument(f"field {key} must be an integer from 0 to 2**53")
    return value


def encode_content(content: bytes | None) -> dict[str, Any] | None:
    """Inline wire form of bytes: ``{"t": text}`` when they are UTF-8 (cheaper, readable), else ``{"b": base64}``."""
    if content is None:
        return None
    try:
        return {"t": content.decode()}
    except UnicodeDecodeError:
        return {"b": base64.b64encode(content).decode()}


def decode_content(content: Mapping[str, Any] | None) -> bytes | None:
    """The bytes of an inline wire form.

    Raises:
        InvalidArgument: Neither form.
    """
    if content is None:
        return None
    text, encoded = content.get("t"), content.get("b")
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    if isinstance(encoded, str):
        try:
            return base64.b64decode(encoded, validate=True)
        except ValueError as exc:
            raise InvalidArgument(f"content is not valid base64: {exc}") from None
    raise InvalidArgument("content must be inline text, base64 or a blob")


def put_beside(value: Any, least: int) -> tuple[Any, list[int], bytes] | None:
    """A command's value without its output, the bytes of each stream and both together; None below ``least``
    characters. Reading and writing 1 MiB as a JSON string takes longer than all else that is done with it."""
    found = [value.get(name) for name in _STREAMS] if isinstance(value, dict) else []
    streams = [stream for stream in found if isinstance(stream, str)]
    if len(streams) != len(_STREAMS) or sum(map(len, streams)) < least:
        return None
    parts = [stream.encode("utf-8", "surrogatepass") for stream in streams]
    return {**value, **dict.fromkeys(_STREAMS, "")}, [len(part) for part in parts], b"".join(parts)


def take_beside(value: dict[str, Any], lengths: list[int], content: bytes) -> dict[str, Any]:
    """The value as it was before `put_beside`."""
    out, err = content[: lengths[0]], content[lengths[0] :]
    streams = (str(part, "utf-8", "surrogatepass") for part in (out, err))
    return {**value, **dict(zip(_STREAMS, streams, strict=True))}


def shown_owner(owner: object) -> str:
    """Whose operation it is, as Flower shows it beside the arguments: ``thread alice · user 42``.

    Whatever is no ``[user_id, thread_id]`` of well-formed ids gives an empty text: it may come from anyone.
    """
    if not isinstance(owner, list | tuple) or len(owner) != 2:
        return ""
    user_id, thread_id = owner
    if not isinstance(thread_id, str) or _ID.fullmatch(thread_id) is None:
        return ""
    if isinstance(user_id, str) and _ID.fullmatch(user_id) is not None:
        return f"thread {thread_id} · user {user_id}"
    return f"thread {thread_id}"


_EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


def celery_message(
    task: str,
    task_id: str,
    argument: Mapping[str, Any],
    *,
    queue: str,
    describe: str,
    headers: Mapping[str, Any] | None = None,
) -> str:
    """The JSON that, LPUSHed onto ``queue``, is this task for any Celery worker.

    No result is stored (the reply stream answers); Flower shows ``describe`` as the arguments. The body is
    plain text instead of kombu's base64: kombu reads both, and a third of the bytes is saved.
    """
    return json.dumps(
        {
            "body": json.dumps(((argument,), {}, _EMBED), separators=(",", ":")),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {
                "lang": "py",
                "task": task,
                "id": task_id,
                "shadow": None,
                "eta": None,
                "expires": None,
                "group": None,
                "group_index": None,
                "retries": 0,
                "timelimit": [None, None],
                "root_id": task_id,
                "parent_id": None,
                "argsrepr": describe,
                "kwargsrepr": shown_owner(argument.get("owner")) or "{}",
                "origin": f"{os.getpid()}@{_ORIGIN_HOST}",
                "ignore_result": True,
                "replaced_task_nesting": 0,
                "stamped_headers": None,
                "stamps": {},
                **(headers or {}),
            },
            "properties": {
                "correlation_id": task_id,
                "reply_to": "",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": queue},
                "priority": 0,
                "delivery_tag": new_token(),
            },
        },
        separators=(",", ":"),
    )
