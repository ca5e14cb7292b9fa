"""Paths as the tools judge them: one spelling per file, what listings leave out, what may be shown to a user. Pure."""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import Iterable

from sandfleet.errors import InvalidArgument

__all__ = [
    "IGNORE_PATTERNS",
    "OUTPUTS",
    "WORKSPACE",
    "is_ignored",
    "listed",
    "normalise",
    "output_path",
]

_USER_DATA = "/mnt/user-data"
WORKSPACE = f"{_USER_DATA}/workspace"
OUTPUTS = f"{_USER_DATA}/outputs"

#: Names that listings and searches pass over, at any depth below where they begin; the same list as sandboxd's.
IGNORE_PATTERNS: tuple[str, ...] = tuple(
    """
    .git .svn .hg .bzr node_modules __pycache__ .venv venv .env env .tox .nox .eggs *.egg-info site-packages
    dist build .next .nuxt .output .turbo target out .idea .vscode *.swp *.swo *~ .project .classpath .settings
    .DS_Store Thumbs.db desktop.ini *.lnk *.log *.tmp *.temp .upload-*.part *.bak *.cache .cache logs .coverage
    coverage .nyc_output htmlcov .pytest_cache .mypy_cache .ruff_cache
    """.split()  # noqa: SIM905  (a list of fifty one-word lines is no easier to compare)
)
_NAMES = frozenset(pattern for pattern in IGNORE_PATTERNS if "*" not in pattern)
_GLOBS = tuple(pattern for pattern in IGNORE_PATTERNS if "*" in pattern)


def is_ignored(name: str) -> bool:
    """Whether listings pass over a file or directory of that name."""
    return name in _NAMES or any(fnmatch.fnmatchcase(name, pattern) for pattern in _GLOBS)


def listed(top: str, paths: Iterable[str]) -> list[str]:
    """The paths below ``top`` without those that have an ignored name on their way; ``top`` itself may have one."""
    return [path for path in paths if not any(is_ignored(part) for part in _below(top, path).split("/") if part)]


def _below(top: str, path: str) -> str:
    """The part of ``path`` after ``top``, whether the listing repeats ``top`` as given or resolved."""
    for folder, name in ((top, path), (normalise(top), normalise(path))):
        prefix = folder.rstrip("/") + "/"
        if name.startswith(prefix):
            return name[len(prefix) :]
    return path.rstrip("/").rpartition("/")[2]


def normalise(path: str) -> str:
    """The absolute path without ``.``, ``..``, doubled slashes and aliases: one spelling for one file.

    Relative paths begin in the workspace, and ``/workspace`` is the same directory. Symbolic links are not looked at:
    this is a key, not a security check.
    """
    full = posixpath.normpath(posixpath.join(WORKSPACE, path))
    full = "/" + full.lstrip("/")
    if full == "/workspace" or full.startswith("/workspace/"):
        full = WORKSPACE + full[len("/workspace") :]
    return full


def output_path(path: str) -> str:
    """The normalised path of a file the agent may present.

    Raises:
        InvalidArgument: It is not below the outputs directory, or says ``..``.
    """
    full = normalise(path)
    if ".." in path.replace("\\", "/").split("/") or "\0" in path or not full.startswith(OUTPUTS + "/"):
        raise InvalidArgument(f"Only files in {OUTPUTS} can be presented: {path}", argument="paths")
    return full
