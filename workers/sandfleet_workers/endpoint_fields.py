"""Reading one field at a time from what a sandbox answered; each check is one call and raises `BadReply`."""

from __future__ import annotations

from typing import Any

from sandfleet_workers.endpoint_http import BadReply

__all__ = [
    "count",
    "field",
    "file_info",
    "items",
    "number",
    "optional_count",
    "optional_text",
    "table",
    "text",
    "text_read",
]

_ENCODINGS = frozenset({"utf-8", "utf-8-sig", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"})


def field(data: dict[str, Any], name: str, *kinds: type) -> Any:
    """The value, of one of the types (a bool is no int)."""
    value = data.get(name)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise BadReply(f"field {name!r} is a {type(value).__name__}")
    return value


def text(data: dict[str, Any], name: str) -> str:
    """A string."""
    value = data.get(name)
    if not isinstance(value, str):
        raise BadReply(f"field {name!r} is a {type(value).__name__}")
    return value


def optional_text(data: dict[str, Any], name: str, limit: int = 4096) -> str | None:
    """A string cut at ``limit`` characters, or None."""
    value: str | None = field(data, name, str, type(None))
    return value[:limit] if value is not None else None


def count(data: dict[str, Any], name: str) -> int:
    """A whole number that is not negative."""
    value: int = field(data, name, int)
    if not 0 <= value < 2**63:
        raise BadReply(f"field {name!r} is out of range")
    return value


def optional_count(data: dict[str, Any], name: str) -> int | None:
    """A whole number that is not negative, or None."""
    return None if data.get(name) is None else count(data, name)


def number(data: dict[str, Any], name: str) -> float:
    """A finite number."""
    value: float = field(data, name, int, float)
    if not -1e15 < value < 1e15:
        raise BadReply(f"field {name!r} is out of range")
    return float(value)


def items(data: dict[str, Any], name: str, most: int) -> list[Any]:
    """A list of ``most`` items at most."""
    value: list[Any] = field(data, name, list)
    if len(value) > most:
        raise BadReply(f"field {name!r} has {len(value)} items where {most} are the most")
    return value


def table(value: object) -> dict[str, Any]:
    """The value as a JSON object."""
    if not isinstance(value, dict):
        raise BadReply("an item that is no JSON object")
    return value


def text_read(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a TextRead, but its text, of sandboxd's form."""
    encoding = text(data, "encoding")
    if encoding not in _ENCODINGS:
        raise BadReply("an encoding that is none of ours")
    return {
        "start_line": count(data, "start_line"),
        "end_line": count(data, "end_line"),
        "total_lines": optional_count(data, "total_lines"),
        "total_chars": optional_count(data, "total_chars"),
        "truncated": field(data, "truncated", bool),
        "cut_line": field(data, "cut_line", bool),
        "encoding": encoding,
        "size_bytes": count(data, "size"),
        "digest": optional_text(data, "digest", 64),
    }


def file_info(raw: object) -> dict[str, Any]:
    """A FileInfo dict of sandboxd's stat form."""
    data = table(raw)
    kind = text(data, "type")
    return {
        "path": text(data, "path"),
        "name": text(data, "name"),
        "type": kind if kind in {"file", "dir", "symlink"} else "other",
        "size": count(data, "size"),
        "mode": count(data, "mode"),
        "modified_at": number(data, "mtime"),
        "target": optional_text(data, "target"),
    }
