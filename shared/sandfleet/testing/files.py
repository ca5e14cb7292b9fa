"""A file system in memory that answers as sandboxd does, error for error."""

from __future__ import annotations

import hashlib
import os
import posixpath
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from sandfleet.errors import (
    AlreadyExists,
    DigestMismatch,
    InvalidArgument,
    IsDirectory,
    NotDirectory,
    PathNotFound,
    SandfleetError,
)
from sandfleet.testing.nodes import Node, Place, info
from sandfleet.testing.patterns import glob_matcher, grep_expression, is_ignored
from sandfleet.testing.texts import check_range, replaced

__all__ = ["HOME", "USER_DATA", "MemoryFiles"]

USER_DATA = "/mnt/user-data"
HOME = f"{USER_DATA}/workspace"
_LONGEST_NAME, _MOST_LINKS = 255, 40
#: sandboxd does not read a file again from its beginning only to tell the digest after an append.
_DIGESTED_APPEND = 4 * 1024 * 1024
_LARGE, _LONG_LINE, _SHOWN_LINE = 1_000_000, 2000, 200


class MemoryFiles:
    """Directories, files and symbolic links; no owners, no limits. Not thread-safe: hold a lock around it.

    Relative paths begin in ``/mnt/user-data/workspace``, and ``/workspace`` is the same directory.
    """

    def __init__(self) -> None:
        self._root = Node(None)
        for path in (HOME, f"{USER_DATA}/uploads", f"{USER_DATA}/outputs", "/tmp"):
            self.make_dir(path)
        home = self._get(HOME)
        self._root.children["workspace"] = home

    # --- paths ---------------------------------------------------------------------------------

    @staticmethod
    def absolute(path: str) -> str:
        """The path from the root, otherwise as it was given."""
        if not path or "\0" in path:
            raise InvalidArgument("a path must not be empty or contain NUL", argument="path")
        return posixpath.join(HOME, path)

    def _place(self, path: str, *, follow: bool = True) -> Place:
        """Walk as a kernel does: ``..`` and links mean what they lead to, the last link only with ``follow``."""
        left = deque(self.absolute(path).split("/"))
        follow = follow or not left[-1]
        stack = [Place(self._root, "/", self._root)]
        links = 0
        while left:
            part, here = left.popleft(), stack[-1].node
            assert here is not None
            last = not any(left)
            if part in ("", ".", ".."):
                if part and not here.is_dir:
                    raise NotDirectory("Not a directory", path=path)
                if part == ".." and len(stack) > 1:
                    stack.pop()
                continue
            if not here.is_dir:
                raise NotDirectory("Not a directory", path=path)
            if len(os.fsencode(part)) > _LONGEST_NAME:
                raise InvalidArgument("File name too long", path=path, errno="ENAMETOOLONG")
            child = here.children.get(part)
            if child is not None and child.target is not None and (follow or not last):
                links += 1
                if links > _MOST_LINKS:
                    raise InvalidArgument("Too many levels of symbolic links", path=path, errno="ELOOP")
                stack = stack[:1] if child.target.startswith("/") else stack
                left.extendleft(reversed(child.target.split("/")))
                continue
            if child is None:
                if not last:
                    raise PathNotFound("No such file or directory", path=path)
                return Place(here, part, None)
            stack.append(Place(here, part, child))
        found = stack[-1]
        if path.endswith("/") and found.node is not None and not found.node.is_dir:
            raise NotDirectory("Not a directory", path=path)
        return found

    def _find(self, path: str, *, follow: bool = True) -> Node | None:
        """What is at the path, or None, also when the directory it would be in is missing."""
        try:
            return self._place(path, follow=follow).node
        except PathNotFound:
            return None

    def _get(self, path: str, *, follow: bool = True) -> Node:
        node = self._place(path, follow=follow).node
        if node is None:
            raise PathNotFound("No such file or directory", path=path)
        return node

    def _file(self, path: str) -> Node:
        node = self._get(path)
        if node.is_dir:
            raise IsDirectory("Is a directory", path=path)
        return node

    def _directory(self, path: str) -> Node:
        node = self._get(path)
        if not node.is_dir:
            raise NotDirectory("Not a directory", path=path)
        return node

    # --- contents ------------------------------------------------------------------------------

    def read(
        self, path: str, start: int | None, end: int | None, most: int | None, offset: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        """(value, content) of read_file."""
        check_range(start, end)
        data = self.data(path)
        lines = _lines(data)
        total: int | None = len(lines) if not offset else None
        content = data[offset:]
        if start is not None or end is not None:
            content = b"".join(lines[(start or 1) - 1 : end])
            if end is not None and end < len(lines):
                total = None  # sandboxd does not read on to find out
        truncated = most is not None and len(content) > most
        if truncated:
            content, total = content[:most], None
        return {"size": len(data), "total_lines": total, "truncated": truncated}, content

    def data(self, path: str) -> bytes:
        """A file's bytes."""
        return self._file(path).data or b""

    def write(
        self,
        path: str,
        data: bytes,
        *,
        append: bool = False,
        if_digest: str | None = None,
        if_size: int | None = None,
        mode: int | None = None,
        parents: bool = True,
    ) -> dict[str, Any]:
        """The value of write_file."""
        if posixpath.basename(path) in ("", ".", ".."):
            raise IsDirectory("Is a directory", path=path)
        node = self._find(path)
        if node is not None and node.is_dir:
            raise IsDirectory("Is a directory", path=path)
        before = b"" if node is None else node.data or b""
        if if_digest is not None:
            current = None if node is None else _digest(before)
            if (current or "") != if_digest.lower():
                raise DigestMismatch("the file has changed", path=path, digest=current)
        if if_size is not None and len(before) != if_size:
            raise DigestMismatch("the file has changed", path=path, size=len(before))
        if node is None:
            place = self._new_place(path) if parents else self._place(path)
            node = place.folder.children[place.name] = Node(b"")
        node.data = before + data if append else data
        node.mode = node.mode if mode is None else mode
        node.modified_at = time.time()
        told = not append or if_digest is not None or max(len(node.data), len(data)) <= _DIGESTED_APPEND
        return {"size": len(node.data), "digest": _digest(node.data) if told else None}

    def replace(self, path: str, old: str, new: str, *, every: bool, if_digest: str | None = None) -> dict[str, Any]:
        """The value of str_replace."""
        if posixpath.basename(path) in ("", ".", ".."):
            raise IsDirectory("Is a directory", path=path)
        node = self._file(path)
        if if_digest is not None and _digest(node.data or b"") != if_digest.lower():
            raise DigestMismatch("the file has changed", path=path, digest=_digest(node.data or b""))
        count, node.data = replaced(node.data or b"", old, new, path, every=every)
        node.modified_at = time.time()
        return {"count": count, "digest": _digest(node.data)}

    # --- the tree ------------------------------------------------------------------------------

    def stat(self, path: str, *, follow: bool = True) -> dict[str, Any]:
        """A FileInfo dict."""
        node, itself = self._get(path, follow=follow), self._get(path, follow=False)
        return {**info(self.absolute(path), node), "target": itself.target}

    def make_dir(self, path: str, *, parents: bool = True, exist_ok: bool = True, mode: int | None = None) -> None:
        """Create a directory."""
        bare = self.absolute(path).rstrip("/") or "/"
        if self._find(bare, follow=False) is not None:
            if exist_ok and self._leads_to_dir(bare):
                return
            raise AlreadyExists("File exists", path=path)
        if parents and bare != "/":
            try:
                self._place(bare)
            except PathNotFound:
                with suppress(AlreadyExists):  # a link that leads nowhere, which the next line finds out
                    self.make_dir(posixpath.dirname(bare))
        place = self._place(bare)
        made = place.folder.children[place.name] = Node(None)
        made.mode = made.mode if mode is None else mode

    def _make_parents(self, path: str) -> None:
        folder = posixpath.dirname(self.absolute(path).rstrip("/"))
        if self._find(folder, follow=False) is not None and not self._leads_to_dir(folder):
            raise NotDirectory("Not a directory", path=path)
        self.make_dir(folder)

    def _new_place(self, path: str) -> Place:
        """Where a new file goes, with the directories it needs; through a link, where that leads."""
        self._make_parents(path)
        there = self._find(path, follow=False)
        if there is not None and there.target is not None:
            return self._new_place(posixpath.join(posixpath.dirname(self.absolute(path)), there.target))
        return self._place(path)

    def make_link(self, path: str, target: str, *, overwrite: bool) -> None:
        """Create a symbolic link."""
        if path.endswith("/"):
            raise IsDirectory("Is a directory", path=path)
        self._make_parents(path)
        place = self._place(path, follow=False)
        if place.node is not None and not (overwrite and place.node.target is not None):
            raise AlreadyExists("File exists", path=path)
        place.folder.children[place.name] = Node(None, target)

    def remove(self, path: str, *, recursive: bool, missing_ok: bool) -> None:
        """Remove a file, or a tree."""
        place = self._place(path, follow=False) if not missing_ok else self._place_or_none(path)
        if place is None or place.node is None:
            if missing_ok:
                return
            raise PathNotFound("No such file or directory", path=path)
        if posixpath.basename(path.rstrip("/")) in (".", ".."):
            raise InvalidArgument("Invalid argument", path=path, errno="EINVAL")
        if place.node.children and not recursive:
            raise InvalidArgument("the directory is not empty", argument="recursive", path=path)
        place.folder.children.pop(place.name, None)

    def _place_or_none(self, path: str) -> Place | None:
        try:
            return self._place(path, follow=False)
        except PathNotFound:
            return None

    def move(self, path: str, to: str, *, overwrite: bool, follow: bool = False) -> None:
        """Rename."""
        follow = follow and overwrite
        try:
            there = self._find(to, follow=follow)
        except (InvalidArgument, NotDirectory):
            there = None  # as os.path.lexists sees it; that it cannot be is said when the source is known to be there
        if there is not None and not overwrite:
            raise AlreadyExists("the target exists", path=to)
        if self._leads_to_dir(to) and not self._leads_to_dir(path):
            raise IsDirectory("the target is a directory", path=to)
        node = self._get(path, follow=False)
        self._make_parents(to)
        if {posixpath.basename(path), posixpath.basename(to)} & {".", ".."}:
            raise InvalidArgument("Device or resource busy", path=path, errno="EBUSY")
        itself = self._find(path.rstrip("/"), follow=False) if path.strip("/") else None
        if path.endswith("/") and itself is not None and itself.target is not None:
            raise NotDirectory("Not a directory", path=path)
        source, goal = self._place(path, follow=False), self._place(to, follow=follow)
        if goal.node is node:
            return
        if to.endswith("/") and not node.is_dir:
            raise NotDirectory("Not a directory", path=path)
        if node.is_dir and self._below(node, goal.folder):
            raise InvalidArgument("Invalid argument", path=path, errno="EINVAL")
        if goal.node is not None:
            self._check_replacing(source, goal.node, path, to)
        goal.folder.children[goal.name] = source.folder.children.pop(source.name)

    def _check_replacing(self, source: Place, there: Node, path: str, to: str) -> None:
        """What a kernel says to a rename onto something, in its order."""
        assert source.node is not None
        if there.is_dir and self._below(there, source.folder):
            raise AlreadyExists("the target is not empty", path=to)
        if there.is_dir and not source.node.is_dir:
            raise IsDirectory("Is a directory", path=path)
        if source.node.is_dir and not there.is_dir:
            raise NotDirectory("Not a directory", path=path)
        if there.children:
            raise AlreadyExists("the target is not empty", path=to)

    def _leads_to_dir(self, path: str) -> bool:
        try:
            node = self._find(path)
        except SandfleetError:
            return False
        return node is not None and node.is_dir

    def _below(self, top: Node, node: Node) -> bool:
        return top is node or any(self._below(child, node) for child in top.children.values())

    def list(self, path: str, depth: int, most: int) -> dict[str, Any]:
        """The value of list_dir."""
        top = self.absolute(path)
        entries: list[dict[str, Any]] = []
        for relative, node in self._walk(self._directory(path), depth, ignoring=False):
            if len(entries) >= most:
                return {"entries": entries, "truncated": True}
            entries.append(info(posixpath.join(top, relative), node))
        return {"entries": entries, "truncated": False}

    def size_bytes(self) -> int:
        """What all files hold together."""
        return sum(len(node.data or b"") for _path, node in self._walk(self._get(USER_DATA), 1_000, ignoring=False))

    # --- search --------------------------------------------------------------------------------

    def _walk(self, top: Node, depth: int, *, ignoring: bool, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """(relative path, node) of everything below, depth first, sorted."""
        for name in sorted(top.children, key=os.fsencode):
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
            if file.data is None or (wanted is not None and not wanted(relative)):
                continue
            where = posixpath.join(top, relative) if node.is_dir else top
            for number, line in _searchable(file.data, skipped):
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


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
