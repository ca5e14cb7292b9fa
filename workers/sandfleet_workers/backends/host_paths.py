"""What a sandbox in host mode calls its paths, and where they lie on the host; both ways. Pure.

Commands in host mode run on the host itself, where ``/mnt/user-data`` does not exist. So the paths in a command line
are translated before it runs, and the host's paths are masked in everything that comes back. Contents of files are
never rewritten, in either direction.

Both directions look for whole paths: ``/mnt/user-database`` is another directory than ``/mnt/user-data``, and in
``PATH=/mnt/user-data/a:/mnt/user-data/b`` there are two paths.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as Table
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

__all__ = ["HOME", "Mapping", "PathMap", "unsafe_in_commands"]

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
#: How far a look to the left goes.
_LOOK_BACK = 64
#: A host path of so many components is masked wherever it stands: nothing else looks like it.
_DEEP = 3
#: Where sandboxd left something out.
_GAP = re.compile(r"(\n\.\.\. \[\d+ bytes discarded\] \.\.\.\n)")
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
        hidden: Further host paths that are only masked, each with what is shown for it.
    """

    def __init__(self, mappings: Iterable[Mapping], hidden: Table[str, str] | None = None) -> None:
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
        for host, shown in (hidden or {}).items():
            self.masks.setdefault(host, shown)
        #: The same as programs write them: as they are, in JSON, in URLs.
        self._forms: dict[str, str] = {}
        for host, shown in self.masks.items():
            for form, shown_form in zip(_forms(host), _forms(shown), strict=True):
                self._forms.setdefault(form, shown_form)
        self._deep = {form for host in self.masks if host.count("/") >= _DEEP for form in _forms(host)}
        self._host = _alternatives(self._forms)

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
        return self._host.sub(lambda match: self._forms[match[0]] if self._stands(text, match) else match[0], text)

    def mask_cut(self, text: str, *, ends: bool) -> str:
        """The same for output that was cut: what is left of a path at a cut is taken out.

        Args:
            text: With a note of sandboxd's where something is missing.
            ends: Whether its end is a cut too.
        """
        pieces = _GAP.split(text)
        for number in range(0, len(pieces), 2):
            piece = pieces[number] if number == 0 else self._without_rest(pieces[number])
            if ends or number + 1 < len(pieces):
                piece = self._without_begun(piece)
            pieces[number] = self.mask(piece)
        return "".join(pieces)

    def _without_begun(self, text: str) -> str:
        """Text without a host path that has only begun at its end."""
        for start in range(max(0, len(text) - max(map(len, self._forms), default=0)), len(text) - 1):
            if any(len(form) > len(text) - start and text.endswith(form[: len(text) - start]) for form in self._forms):
                return text[:start]
        return text

    def _without_rest(self, text: str) -> str:
        """Text without a host path of which only more than a name is left at its beginning."""
        rests = (form[start:] for form in self._forms for start in range(1, len(form)))
        found = [len(rest) for rest in rests if text.startswith(rest) and re.search(r"/|%2[Ff]", rest)]
        return text[max(found, default=0) :]

    def _stands(self, text: str, match: re.Match[str]) -> bool:
        if match[0] in self._deep:
            return True
        start = match.start()
        before = text[max(0, start - _LOOK_BACK) : start]
        return _begins(text, start) or before.endswith("://") or _COLOUR.search(before) is not None

    def mask_all(self, value: Any) -> Any:
        """A JSON value with every text in it masked; keys stay."""
        if isinstance(value, str):
            return self.mask(value)
        if isinstance(value, dict):
            return {key: self.mask_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask_all(item) for item in value]
        return value


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


def _forms(path: str) -> Iterator[str]:
    """A path as it is and as programs escape it; always as many."""
    in_json = json.dumps(path)[1:-1]
    in_url = quote(path, safe="")
    yield from (path, in_json, in_json.replace("/", "\\/"), quote(path), in_url)
    yield re.sub(r"%[0-9A-F]{2}", lambda code: code[0].lower(), in_url)
