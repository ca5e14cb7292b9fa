"""A file system in memory that answers as sandboxd does, error for error."""

from __future__ import annotations

import hashlib
import posixpath
import time
from collections.abc import Iterator
from typing import Any

from sandfleet.errors import (
    AlreadyExists,
    AmbiguousMatch,
    DigestMismatch,
    InvalidArgument,
    IsDirectory,
    NoMatch,
    NotDirectory,
    PathNotFound,
)
from sandfleet.testing.patterns import glob_matcher, grep_expression, is_ignored

__all__ = ["HOME", "USER_DATA", "MemoryFiles"]

USER_DATA = "/mnt/user-data"
HOME = f"{USER_DATA}/workspace"
_LARGE, _LONG_LINE, _SHOWN_LINE = 1_000_000, 2000, 200


class _Node:
    """A file (``data``) or a directory (``children``)."""

    __slots__ = ("children", "data", "mode", "modified_at")

    def __init__(self, data: bytes | None) -> None:
        self.data = data
        self.children: dict[str, _Node] = {}
        self.mode = 0o755 if data is None else 0o644
        self.modified_at = time.time()

    @property
    def is_dir(self) -> bool:
        return self.data is None


class MemoryFiles:
    """Directories and files; no symlinks, no owners, no limits. Not thread-safe: hold a lock around it.

    Relative paths begin in ``/mnt/user-data/workspace``, and ``/workspace`` is the same directory.
    """

    def __init__(self) -> None:
        self._root = _Node(None)
        for path in (HOME, f"{USER_DATA}/uploads", f"{USER_DATA}/outputs", "/tmp"):
            self.make_dir(path)

    # --- paths ---------------------------------------------------------------------------------

    @staticmethod
    def absolute(path: str) -> str:
        """The path without ``..``, from the root."""
        if not path or "\0" in path:
            raise InvalidArgument("a path must not be empty or contain NUL", argument="path")
        full = posixpath.normpath(posixpath.join(HOME, path))
        full = "/" + full.lstrip("/")
        return HOME + full[len("/workspace") :] if full == "/workspace" or full.startswith("/workspace/") else full

    def _find(self, path: str) -> _Node | None:
        node = self._root
        for part in self.absolute(path).split("/")[1:]:
            if not part:
                continue
            if not node.is_dir:
                raise NotDirectory("Not a directory", path=path)
            found = node.children.get(part)
            if found is None:
                return None
            node = found
        return node

    def _get(self, path: str) -> _Node:
        node = self._find(path)
        if node is None:
            raise PathNotFound("No such file or directory", path=path)
        return node

    def _file(self, path: str) -> _Node:
        node = self._get(path)
        if node.is_dir:
            raise IsDirectory("Is a directory", path=path)
        return node

    def _directory(self, path: str) -> _Node:
        node = self._get(path)
        if not node.is_dir:
            raise NotDirectory("Not a directory", path=path)
        return node

    def _parent(self, path: str, *, make: bool = False) -> tuple[_Node, str]:
        folder, name = posixpath.split(self.absolute(path))
        if make:
            self.make_dir(folder)
        return self._directory(folder), name

    # --- contents ------------------------------------------------------------------------------

    def read(self, path: str, start: int | None, end: int | None, most: int | None) -> tuple[dict[str, Any], bytes]:
        """(value, content) of read_file."""
        if start is not None and end is not None and start > end:
            raise InvalidArgument("start_line > end_line", argument="start_line")
        data = self._file(path).data or b""
        lines = _lines(data)
        total: int | None = len(lines)
        content = data
        if start is not None or end is not None:
            content = b"".join(lines[(start or 1) - 1 : end])
            if end is not None and end < len(lines):
                total = None  # sandboxd does not read on to find out
        truncated = most is not None and len(content) > most
        if truncated:
            content, total = content[:most], None
        return {"size": len(data), "total_lines": total, "truncated": truncated}, content

    def write(self, path: str, data: bytes, *, append: bool, if_digest: str | None, parents: bool) -> dict[str, Any]:
        """The value of write_file."""
        node = self._find(path)
        if (node is not None and node.is_dir) or path.endswith("/"):
            raise IsDirectory("Is a directory", path=path)
        if if_digest is not None:
            current = None if node is None else _digest(node.data or b"")
            if (current or "") != if_digest.lower():
                raise DigestMismatch("the file has changed", path=path, digest=current)
        if node is None:
            folder, name = self._parent(path, make=parents)
            node = folder.children[name] = _Node(b"")
        node.data = (node.data or b"") + data if append else data
        node.modified_at = time.time()
        return {"size": len(node.data), "digest": _digest(node.data)}

    def replace(self, path: str, old: bytes, new: bytes, *, every: bool) -> dict[str, Any]:
        """The value of str_replace."""
        node = self._file(path)
        data = node.data or b""
        count = data.count(old)
        if count == 0:
            raise NoMatch("the text was not found", path=path)
        if count > 1 and not every:
            raise AmbiguousMatch(
                "the text was found several times", path=path, count=count, lines=_lines_with(data, old)
            )
        node.data, node.modified_at = data.replace(old, new), time.time()
        return {"count": count, "digest": _digest(node.data)}

    # --- the tree ------------------------------------------------------------------------------

    def stat(self, path: str) -> dict[str, Any]:
        """A FileInfo dict."""
        return _info(self.absolute(path), self._get(path))

    def make_dir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Create a directory."""
        node = self._find(path)
        if node is not None:
            if exist_ok and node.is_dir:
                return
            raise AlreadyExists("File exists", path=path)
        folder, name = self._parent(path, make=parents)
        folder.children[name] = _Node(None)

    def remove(self, path: str, *, recursive: bool, missing_ok: bool) -> None:
        """Remove a file, or a tree."""
        node = self._find(path)
        if node is None:
            if missing_ok:
                return
            raise PathNotFound("No such file or directory", path=path)
        if node.children and not recursive:
            raise InvalidArgument("the directory is not empty", argument="recursive", path=path)
        folder, name = self._parent(path)
        folder.children.pop(name, None)

    def move(self, path: str, to: str, *, overwrite: bool) -> None:
        """Rename."""
        target = self._find(to)
        if target is not None and not overwrite:
            raise AlreadyExists("the target exists", path=to)
        node = self._get(path)
        if target is not None and target.is_dir and not node.is_dir:
            raise IsDirectory("the target is a directory", path=to)
        if target is not None and target.children:
            raise AlreadyExists("the target is not empty", path=to)
        if target is not None and node.is_dir and not target.is_dir:
            raise NotDirectory("Not a directory", path=to)
        if self.absolute(to).startswith(self.absolute(path) + "/"):
            raise InvalidArgument("a directory cannot move into itself", path=path)
        folder, name = self._parent(path)
        into, new_name = self._parent(to, make=True)
        into.children[new_name] = folder.children.pop(name)

    def list(self, path: str, depth: int, most: int) -> dict[str, Any]:
        """The value of list_dir."""
        top = self.absolute(path)
        entries: list[dict[str, Any]] = []
        for relative, node in self._walk(self._directory(path), depth, ignoring=False):
            if len(entries) >= most:
                return {"entries": entries, "truncated": True}
            entries.append(_info(posixpath.join(top, relative), node))
        return {"entries": entries, "truncated": False}

    # --- search --------------------------------------------------------------------------------

    def _walk(self, top: _Node, depth: int, *, ignoring: bool, prefix: str = "") -> Iterator[tuple[str, _Node]]:
        """(relative path, node) of everything below, depth first, sorted."""
        for name in sorted(top.children):
            if ignoring and is_ignored(name):
                continue
            node = top.children[name]
            yield prefix + name, node
            if node.is_dir and depth > 1:
                yield from self._walk(node, depth - 1, ignoring=ignoring, prefix=f"{prefix}{name}/")

    def glob(self, path: str, pattern: str, *, include_dirs: bool, most: int) -> dict[str, Any]:
        """The value of glob."""
        matches, top, found = glob_matcher(pattern), self.absolute(path), list[str]()
        for relative, node in self._walk(self._directory(path), 1_000, ignoring=True):
            if matches(relative) and (include_dirs or not node.is_dir):
                if len(found) >= most:
                    return {"paths": found, "truncated": True}
                found.append(posixpath.join(top, relative))
        return {"paths": found, "truncated": False}

    def grep(
        self, path: str, pattern: str, *, glob: str | None, literal: bool, case_sensitive: bool, most: int
    ) -> dict[str, Any]:
        """The value of grep."""
        search = grep_expression(pattern, literal=literal, case_sensitive=case_sensitive).search
        wanted = glob_matcher(glob) if glob else None
        top, node = self.absolute(path), self._get(path)
        skipped = {"large": 0, "binary": 0, "long_lines": 0, "errors": 0}
        result: dict[str, Any] = {"matches": [], "truncated": False, "skipped": skipped}
        entries = self._walk(node, 1_000, ignoring=True) if node.is_dir else [(posixpath.basename(top), node)]
        for relative, file in entries:
            if file.is_dir or (wanted is not None and not wanted(relative)):
                continue
            where = posixpath.join(top, relative) if node.is_dir else top
            for number, line in _searchable(file.data or b"", skipped):
                if search(line) is None:
                    continue
                if len(result["matches"]) >= most:
                    return {**result, "truncated": True}
                shown = line if len(line) <= _SHOWN_LINE else line[:_SHOWN_LINE] + "..."
                result["matches"].append([where, number, shown])
        return result


def _searchable(data: bytes, skipped: dict[str, int]) -> Iterator[tuple[int, str]]:
    if len(data) > _LARGE or b"\0" in data[:8192]:
        skipped["large" if len(data) > _LARGE else "binary"] += 1
        return
    lines = data.decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        if len(line) > _LONG_LINE:
            skipped["long_lines"] += 1
        else:
            yield number, line.rstrip("\r")


def _lines(data: bytes) -> list[bytes]:
    parts = data.split(b"\n")
    last = parts.pop()
    return [part + b"\n" for part in parts] + ([last] if last else [])


def _lines_with(data: bytes, old: bytes) -> list[int]:
    lines, position = list[int](), data.find(old)
    while position >= 0 and len(lines) < 20:
        lines.append(1 + data.count(b"\n", 0, position))
        position = data.find(old, position + len(old))
    return lines


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _info(path: str, node: _Node) -> dict[str, Any]:
    return {
        "path": path,
        "name": posixpath.basename(path) or "/",
        "type": "dir" if node.is_dir else "file",
        "size": len(node.data or b""),
        "mode": node.mode,
        "modified_at": node.modified_at,
        "target": None,
    }
