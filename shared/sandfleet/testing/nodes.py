"""What a file system in memory consists of."""

from __future__ import annotations

import posixpath
import time
from typing import Any

__all__ = ["Node", "Place", "info"]


class Node:
    """A file (``data``), a symbolic link (``target``) or a directory (``children``)."""

    __slots__ = ("children", "data", "mode", "modified_at", "target")

    def __init__(self, data: bytes | None, target: str | None = None) -> None:
        self.data = data
        self.target = target
        self.children: dict[str, Node] = {}
        self.mode = 0o777 if target is not None else 0o755 if data is None else 0o644
        self.modified_at = time.time()

    @property
    def is_dir(self) -> bool:
        return self.data is None and self.target is None


class Place:
    """Where a path leads: the directory it is in, its name there, and what is there now."""

    __slots__ = ("folder", "name", "node")

    def __init__(self, folder: Node, name: str, node: Node | None) -> None:
        self.folder, self.name, self.node = folder, name, node


def info(path: str, node: Node) -> dict[str, Any]:
    """The FileInfo dict of a node."""
    return {
        "path": path,
        "name": posixpath.basename(path.rstrip("/")) or "/",
        "type": "dir" if node.is_dir else "file" if node.target is None else "symlink",
        "size": len(node.data or (node.target or "").encode("utf-8", "surrogateescape")),
        "mode": node.mode,
        "modified_at": node.modified_at,
        "target": node.target,
    }
