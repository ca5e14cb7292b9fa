"""Which versions of what sandboxes stand on have known holes: ``known_bad.toml``, read once and compared."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from sandfleet.backends import Finding

__all__ = ["Hole", "is_distribution_build", "known_holes", "parse_version", "version_finding"]

Version = tuple[tuple[int, ...], tuple[int, int]]

_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)*)(?:[-~]?(alpha|beta|rc)[.-]?(\d*))?", re.IGNORECASE)
_STAGES = {"alpha": 0, "beta": 1, "rc": 2}
_RELEASED = (3, 0)
# +ds and +dfsg are Debian's own source; the others are the marks of packages.
_DISTRIBUTION = re.compile(r"[+~](ds|dfsg|deb)|deb\d|ubuntu|\.(el|fc|amzn|azl)\d|-r\d+$|\+azure", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Hole:
    """One entry of the file; see there."""

    component: str
    id: str
    fixed: tuple[str, ...]
    status: str
    what: str
    since: str = "0"

    def is_in(self, version: Version) -> bool:
        """Whether that version has it."""
        if version < parse_version(self.since):
            return False
        fixes = sorted(parse_version(text) for text in self.fixed)
        own_line = [fix for fix in fixes if fix[0][:2] == version[0][:2]]
        return version < (own_line or fixes)[-1]


def parse_version(text: str) -> Version:
    """The number in a version as programs tell it (``1.4.0-rc.3``, ``v1.1.5+ds1``, ``20.10.24+dfsg1``), to compare.

    Raises:
        ValueError: There is none at its beginning.
    """
    found = _NUMBERS.match(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no version")
    numbers = [int(part) for part in found[1].split(".")]
    while len(numbers) < 3:
        numbers.append(0)
    stage = (_STAGES[found[2].lower()], int(found[3] or 0)) if found[2] else _RELEASED
    return tuple(numbers), stage


def is_distribution_build(*texts: str) -> bool:
    """Whether a version (or a build's name beside it) is a distribution's, which carries fixes under old numbers."""
    return any(_DISTRIBUTION.search(text) for text in texts)


@functools.cache
def known_holes() -> tuple[Hole, ...]:
    """All that the file lists."""
    text = files("sandfleet").joinpath("known_bad.toml").read_text(encoding="utf-8")
    return tuple(Hole(**{**entry, "fixed": tuple(entry["fixed"])}) for entry in tomllib.loads(text)["hole"])


def version_finding(
    component: str, version: str, *, build: str = "", label: str = "", holes: Iterable[Hole] | None = None
) -> Finding:
    """What is to be said of a component's version.

    Args:
        component: As the file names it: runc, containerd, moby, redis, valkey.
        version: As the program tells it.
        build: What else it tells of its build, such as a package's full version.
        label: The finding's name; the component's by default.
    """
    name = label or component
    full = build if is_distribution_build(build) else version
    try:
        number = parse_version(version)
    except ValueError:
        return Finding(name, "warn", f"{component} {full or 'of unknown version'}", "its version cannot be compared")
    mine = [hole for hole in (known_holes() if holes is None else holes) if hole.component == component]
    found = [hole for hole in mine if hole.is_in(number)]
    if not found:
        return Finding(name, "ok", f"{component} {full}")
    told = "; ".join(f"{hole.id} ({hole.what})" for hole in found)
    count = f"{len(found)} known hole{'s'[: len(found) > 1]}"
    if is_distribution_build(version, build):
        advice = (
            f"a distribution's build, which may carry the fixes under an old number: keep it up to date and look up "
            f"in its security tracker {told}"
        )
        return Finding(name, "warn", f"{component} {full}, by its number with {count}", advice)
    status = "fail" if any(hole.status == "fail" for hole in found) else "warn"
    return Finding(name, status, f"{component} {full} has {count}", f"{_update(found)}: {told}")


def _update(found: list[Hole]) -> str:
    """What to install: a released version that has every fix, whatever the release line."""
    released = [[fix for fix in hole.fixed if parse_version(fix)[1] == _RELEASED] or hole.fixed for hole in found]
    needed = max((max(fixes, key=parse_version) for fixes in released), key=parse_version)
    return f"install {found[0].component} {needed} or newer"
