"""What host mode refuses before anything starts: paths outside the sandbox's directories. Pure.

For files this is the friendly first look with the exact message; the boundary is in `host_files`, which opens
component by component. For commands there is no boundary at all: a program may open what it likes, however it was
named. The look at the command line catches an agent's mistakes, not an enemy.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sandfleet.errors import PathNotFound, PermissionDenied, ReadOnly
from sandfleet_workers.backends.host_paths import HOME, PathMap
from sandfleet_workers.backends.host_words import Word, words_of

__all__ = ["check_argv", "check_command", "check_cwd", "check_path"]

_SYSTEM = ("/bin/", "/usr/bin/", "/usr/sbin/", "/sbin/", "/usr/local/bin/", "/opt/homebrew/bin/", "/dev/")
#: A bare ``/`` as argument of these means the whole host.
_WALKERS = frozenset(
    ["awk", "cat", "cp", "du", "find", "grep", "head", "less", "ln", "ls", "more", "mv", "rm", "sed", "tail", "tar"]
)
#: Their first quoted argument is a program or a pattern: ``/x/`` in it is no path.
_SCRIPTED = frozenset(["awk", "gawk", "mawk", "sed", "grep", "egrep", "fgrep", "rg", "perl", "jq"])
_PREFIX_WORDS = frozenset(["env", "command", "builtin", "exec", "nohup", "time", "nice"])
_SHELLS = frozenset(["sh", "bash", "zsh", "dash", "ksh"])

_URL = re.compile(r"(?i)(?<![a-z0-9+.-])(?!file:)[a-z][a-z0-9+.-]{0,20}://[^\s\"'`<>|;()]*")
_FILE_URL = re.compile(r"(?i)file://[^\s\"'`<>|;()]*")
_DOTS = re.compile(r"(?:^|(?<=[\s/\\=:,\"'(\[{]))\.\.(?=$|[\s/\\:,\"')\]}])")
_ABSOLUTE = re.compile(r"(?:^|(?<=[\s=:,\"'`(\[{<>@|;&])|(?<=^-[A-Za-z]))/[^\s\"'`=:,;|&<>()\[\]]*")
_PLACEHOLDER = re.compile(r"(?<!\$)\{[A-Za-z_]\w*\}")


@dataclass(frozen=True, slots=True)
class _Simple:
    """One simple command: its name, its words (the name first), and whether a substitution runs it."""

    name: str
    words: tuple[Word, ...]
    nested: bool


# --- files -----------------------------------------------------------------------------------


def check_path(paths: PathMap, path: str, *, write: bool) -> None:
    """Nothing, if a file operation may name that path.

    Raises:
        PermissionDenied: It has ``..`` in it, or lies in none of the sandbox's directories.
        ReadOnly: It would be written where files are only read.
    """
    if ".." in path.replace("\\", "/").split("/"):
        raise PermissionDenied("Access denied: path traversal detected", path=path)
    root = paths.root_of(posixpath.join(HOME, path))
    if root is None:
        raise PermissionDenied(f"Only paths under {_allowed(paths)} are allowed: {path}", path=path)
    if write and root.read_only:
        raise ReadOnly(f"Write access to {root.label} is not allowed: {path}", path=path)


def check_cwd(paths: PathMap, path: str) -> None:
    """Nothing, if a command may start there.

    Raises:
        PermissionDenied: It has ``..`` in it.
        PathNotFound: The sandbox has no such directory.
    """
    if ".." in path.replace("\\", "/").split("/"):
        raise PermissionDenied("Access denied: path traversal detected", path=path)
    if paths.root_of(posixpath.join(HOME, path)) is None:
        raise PathNotFound(f"no such directory in the sandbox; commands start under {_allowed(paths)}", path=path)


def _allowed(paths: PathMap) -> str:
    return ", ".join(f"{root}/" for root in paths.roots)


# --- commands --------------------------------------------------------------------------------


def check_command(paths: PathMap, command: str) -> None:
    """Nothing, if the command line names nothing outside the sandbox's directories, as far as can be seen.

    Raises:
        PermissionDenied: It does; the message names what and lists what is allowed.
    """
    try:
        words = words_of(command)
    except RecursionError:
        raise _refused(paths, "Substitutions in command are nested too deeply to be looked at") from None
    for each in _simple_commands(words):
        _check(paths, each)


def check_argv(paths: PathMap, argv: Sequence[str]) -> None:
    """The same for a program and its arguments; what is given to a shell is read as a command line.

    Raises:
        PermissionDenied: It names something outside.
    """
    words = tuple(Word(text, quoted=number > 0) for number, text in enumerate(argv))
    _check(paths, _Simple(posixpath.basename(argv[0]), words, nested=False))
    if posixpath.basename(argv[0]) in _SHELLS and len(argv) > 2 and argv[1].startswith("-") and "c" in argv[1]:
        check_command(paths, argv[2])


def _simple_commands(words: Iterator[Word]) -> Iterator[_Simple]:
    current: list[Word] = []
    for word in words:
        if word.first and current:
            yield _simple(current)
            current = []
        current.append(word)
    if current:
        yield _simple(current)


def _simple(words: list[Word]) -> _Simple:
    named = (word for word in words if not word.redirect and not re.match(r"[A-Za-z_]\w*=", word.text))
    name = next((word.text for word in named if word.text not in _PREFIX_WORDS), "")
    return _Simple(posixpath.basename(name), tuple(words), words[0].nested)


def _check(paths: PathMap, command: _Simple) -> None:
    for word in command.words:
        if (url := _FILE_URL.search(word.text)) is not None:
            raise _refused(paths, f"Unsafe file:// URL in command: {url[0]}")
        if _DOTS.search(_URL.sub("", word.text)) is not None:
            raise _refused(paths, f"Unsafe path traversal in command: {word.text[:200]}")
    if command.name in ("cd", "pushd"):
        _check_directory_change(paths, command)
    bad = sorted({path for word in _looked_at(command) for path in _unsafe_paths(paths, word.text)})
    if command.name in _WALKERS and any(word.text == "/" for word in command.words):
        bad.insert(0, "/")
    if bad:
        raise _refused(paths, f"Unsafe absolute paths in command: {', '.join(bad)[:500]}")


def _looked_at(command: _Simple) -> Iterator[Word]:
    """The words that may hold paths: all but the program text of a command that is known to take one."""
    script = command.name in _SCRIPTED
    for word in command.words:
        if script and word.quoted and not word.text.startswith("-"):
            script = False
        else:
            yield word


def _check_directory_change(paths: PathMap, command: _Simple) -> None:
    where = next(number for number, word in enumerate(command.words) if posixpath.basename(word.text) == command.name)
    rest = [word for word in command.words[where + 1 :] if not word.redirect]
    # "-" is a target and no option.
    targets = [word for word in rest if word.text == "-" or not word.text.startswith("-")]
    target = targets[0] if targets else None
    shown = f"{command.name} {target.text[:200] if target else ''}".rstrip()
    unsafe = (
        target is None
        or command.nested
        or target.text in ("", "-")
        or target.text.startswith("~")
        or target.expands
        or (target.text.startswith("/") and paths.root_of(target.text) is None)
    )
    if unsafe:
        raise _refused(paths, f"Unsafe working directory change in command: {shown}")


def _unsafe_paths(paths: PathMap, text: str) -> Iterator[str]:
    for match in _ABSOLUTE.finditer(_URL.sub("", text)):
        path = "/" + match[0].lstrip("/")
        if path == "/" or not path.isascii() or _PLACEHOLDER.search(path):
            continue  # a bare slash has a rule of its own; the others are text and templates
        if not path.startswith(_SYSTEM) and paths.root_of(path) is None:
            yield path


def _refused(paths: PathMap, what: str) -> PermissionDenied:
    return PermissionDenied(f"{what}. Use paths under {', '.join(paths.roots)}")
