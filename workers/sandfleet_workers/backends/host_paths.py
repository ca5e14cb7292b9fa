"""What a sandbox in host mode calls its paths, and where they lie on the host; both ways. Pure.

Commands in host mode run on the host itself, where ``/mnt/user-data`` does not exist. So the paths in a command line
are translated before it runs, and the host's paths are masked in everything that comes back. Contents of files are
never rewritten, in either direction.

Both directions look for whole paths: ``/mnt/user-database`` is another directory than ``/mnt/user-data``, and in
``PATH=/mnt/user-data/a:/mnt/user-data/b`` there are two paths.
"""

from __future__ import annotations

import codecs
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["HOME", "Mapping", "PathMap", "StreamMask", "unsafe_in_commands"]

HOME = "/mnt/user-data/workspace"

#: What follows a path that ends here; ``user-data2``, ``user-data-old`` and ``user-data.bak`` are others.
_ENDS = r"(?![\w-]|\.+[\w-])"
#: What stands before a path that begins here would, were it of this kind, make it the tail of a longer one.
_TAIL = re.compile(r"[\w.~+%/})*?\]-]")
_FLAG = re.compile(r"(?:^|[\s\"'`=:;,&|<>(])--?[A-Za-z][A-Za-z-]*$")
_ESCAPE = re.compile(r"\\[abefnrtv0]$")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*[A-Za-z]$")
#: Bounded to the left and in length: a long line of letters is not looked at from each of them anew.
_URL = r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s\"'`<>|;()]*"
#: How far a look to the left goes; the same for whole texts and for streams, so that they agree.
_LOOK_BACK = 64
#: A host path of so many components is masked wherever it stands: nothing else looks like it.
_DEEP = 3
#: What a shell reads as itself outside quotes, and inside any.
_PLAIN_PATH = re.compile(r"(?:/[\w.@%+-]+)+")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A directory of the host under the name it has in the sandbox.

    Attributes:
        virtual: Absolute path in the sandbox, normalised.
        host: Absolute path on the host, as it is written in the settings.
        read_only: Whether file operations may only read it.
        label: What an error calls it.
        resolved: ``host`` without symlinks; empty when it is the same.
        alias: A second name: it is understood, but nothing is shown under it.
    """

    virtual: str
    host: str
    read_only: bool = False
    label: str = "mount"
    resolved: str = ""
    alias: bool = False


class PathMap:
    """All directories a sandbox in host mode sees. The longest virtual prefix decides.

    Args:
        mappings: In any order; no two with one virtual path.
    """

    def __init__(self, mappings: Iterable[Mapping]) -> None:
        self.mappings = tuple(sorted(mappings, key=lambda each: len(each.virtual), reverse=True))
        self._by_virtual = {each.virtual: each for each in self.mappings}
        self._virtual = _alternatives(self._by_virtual)
        self._url_or_virtual = re.compile(f"{_URL}|({self._virtual.pattern})")
        #: Host path → virtual path; raw and resolved ones.
        self.masks: dict[str, str] = {}
        for each in self.mappings:
            if not each.alias:
                for host in (each.host, each.resolved or each.host):
                    self.masks.setdefault(host, each.virtual)
        self._host = _alternatives(self.masks)

    @property
    def roots(self) -> list[str]:
        """The names of the directories, for messages."""
        return sorted(each.virtual for each in self.mappings if not each.alias)

    def root_of(self, path: str) -> Mapping | None:
        """The mapping an absolute virtual path lies in or is; None outside all of them."""
        path = posixpath.normpath(path)
        while True:
            if (found := self._by_virtual.get(path)) is not None:
                return found
            if path in ("/", "//", ""):
                return None
            path = posixpath.dirname(path)

    def to_host(self, path: str) -> str | None:
        """Where an absolute virtual path lies on the host, lexically; None outside all mappings."""
        path = posixpath.normpath(path)
        root = self.root_of(path)
        return None if root is None else root.host + path[len(root.virtual) :]

    def translate(self, text: str) -> str:
        """A command line with its virtual paths replaced by host paths; URLs are left alone."""
        if self._virtual.search(text) is None:
            return text

        def put(match: re.Match[str]) -> str:
            if match[1] is None or not _begins(text, match.start()):
                return match[0]
            return self._by_virtual[match[0]].host

        return self._url_or_virtual.sub(put, text)

    def mask(self, text: str) -> str:
        """Text with the host's paths replaced by virtual ones."""
        return self._mask(text, 0, len(text))

    def _mask(self, text: str, start: int, end: int) -> str:
        pieces: list[str] = []
        done = start
        for match in self._host.finditer(text, start):
            if match.end() > end:
                break
            if self._shown(text, match):
                pieces += [text[done : match.start()], self.masks[match[0]]]
                done = match.end()
        return "".join([*pieces, text[done:end]])

    @staticmethod
    def _shown(text: str, match: re.Match[str]) -> bool:
        if match[0].count("/") >= _DEEP:
            return True
        start = match.start()
        before = text[max(0, start - _LOOK_BACK) : start]
        return _begins(text, start) or before.endswith("://") or _COLOUR.search(before) is not None

    def mask_bytes(self, data: bytes) -> bytes:
        """The same for bytes that may be any text, or none."""
        return self.mask(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def mask_all(self, value: Any) -> Any:
        """A JSON value with every text in it masked; keys stay."""
        if isinstance(value, str):
            return self.mask(value)
        if isinstance(value, dict):
            return {key: self.mask_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask_all(item) for item in value]
        return value

    def undecided(self, text: str, start: int) -> int:
        """From where on it depends on what follows how ``text`` is masked; ``len(text)`` when it does not.

        Nothing before ``start`` is looked at.
        """
        longest = max(map(len, self.masks), default=0)
        # Only dots can keep the end of a path open for longer than the path itself.
        first = max(start, len(text.rstrip(".")) - longest)
        for position in range(first, len(text)):
            if text[position] == "/" and any(_may_go_on(text[position:], host) for host in self.masks):
                return self._behind_match(text, start, position)
        return len(text)

    def _behind_match(self, text: str, start: int, position: int) -> int:
        """``position``, or the end of a decided match that it lies in."""
        for match in self._host.finditer(text, start):
            if match.start() >= position:
                break
            if match.end() > position:
                return match.end() if match.end() < len(text) else match.start()
        return position


class StreamMask:
    """Masks bytes that come in pieces, cut anywhere: together they give what `PathMap.mask_bytes` gives.

    It holds back only what may be the beginning of a host path.
    """

    def __init__(self, paths: PathMap) -> None:
        self._paths = paths
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        #: Where in it the part begins that has not been given out; before it lies what was, for looks to the left.
        self._start = 0

    def feed(self, data: bytes, *, final: bool = False) -> bytes:
        """What can be said now; with ``final`` all of it."""
        self._text += self._decoder.decode(data, final)
        end = len(self._text) if final else self._paths.undecided(self._text, self._start)
        shown = self._paths._mask(self._text, self._start, end)
        keep = max(0, end - _LOOK_BACK)
        self._text, self._start = self._text[keep:], end - keep
        return shown.encode("utf-8", "surrogateescape")


def unsafe_in_commands(host: str) -> bool:
    """Whether a shell would read that host path as something else than itself, so that it cannot be put into one."""
    return _PLAIN_PATH.fullmatch(host) is None


def _alternatives(paths: Iterable[str]) -> re.Pattern[str]:
    ordered = sorted(paths, key=len, reverse=True)
    # Without any the pattern matches nothing at all.
    return re.compile("(?:" + "|".join(map(re.escape, ordered)) + ")" + _ENDS if ordered else r"(?!)")


def _begins(text: str, start: int) -> bool:
    """Whether a path begins at ``start``, rather than going on there."""
    if start == 0 or _TAIL.match(text[start - 1]) is None:
        return True
    before = text[max(0, start - _LOOK_BACK) : start]
    return _FLAG.search(before) is not None or _ESCAPE.search(before) is not None


def _may_go_on(tail: str, host: str) -> bool:
    if len(tail) <= len(host):
        return host.startswith(tail)
    return tail.startswith(host) and not tail[len(host) :].strip(".")
