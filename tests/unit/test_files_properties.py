"""Globs, searches and reads against slow implementations that were written from the reference's text alone.

Each property holds for the functions that sandboxd runs on real files, and for the mock's on files in memory.
"""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sandfleet.errors import SandfleetError
from sandfleet.testing import patterns, texts
from sandfleet.testing.files import MemoryFiles
from sandfleet_workers.sandboxd import sandboxd

TOP = "/mnt/user-data/workspace"
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or its error's code."""
    try:
        return call()
    except sandboxd.ApiError as exc:
        return exc.code
    except SandfleetError as exc:
        return exc.code


# --- globs -----------------------------------------------------------------------------------


def slow_glob(pattern: str, path: str) -> bool:
    """Without a slash: the name at any depth. ``**``: any number of directories. The rest stays in its component."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if "/" not in pattern and parts != ["**"]:
        parts = ["**", *parts]
    return slow_parts(parts, path.split("/"))


def slow_parts(parts: list[str], names: list[str]) -> bool:
    if not parts:
        return not names
    if parts[0] == "**":
        if len(parts) == 1:
            return bool(names)
        return any(slow_parts(parts[1:], names[skip:]) for skip in range(len(names) + 1))
    return bool(names) and slow_name(parts[0], names[0]) and slow_parts(parts[1:], names[1:])


def slow_name(part: str, name: str) -> bool:
    if not part:
        return not name
    if part[0] == "*":
        return any(slow_name(part[1:], name[skip:]) for skip in range(len(name) + 1))
    if part[0] == "[":
        negated = part[1:2] in ("!", "^")
        begin = 2 if negated else 1
        end = part.find("]", begin + 1)
        if end > 0:
            found = bool(name) and in_class(part[begin:end], name[0])
            return bool(name) and found is not negated and slow_name(part[end + 1 :], name[1:])
    return bool(name) and part[0] in ("?", name[0]) and slow_name(part[1:], name[1:])


def in_class(members: str, char: str) -> bool:
    while members:
        if len(members) > 2 and members[1] == "-":
            if members[0] <= char <= members[2]:
                return True
            members = members[3:]
        else:
            if members[0] == char:
                return True
            members = members[1:]
    return False


TOKENS = [
    "a",
    "b",
    "c",
    "*",
    "?",
    "[ab]",
    "[!a]",
    "[^b]",
    "[a-c]",
    "[]a]",
    "[!]]",
    "[",
    "]",
    "**",
    ".",
    "-",
    "\\",
    "ü",
    "\n",
    "+",
]
PARTS = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4).map("".join)
GLOBS = st.lists(PARTS | st.just("**"), min_size=1, max_size=4).map("/".join)
NAME = st.text("abc]-[.\\ü\n+!", min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAME, min_size=1, max_size=4).map("/".join)


@QUICK
@given(GLOBS, PATHS)
@example("a/**/b", "a/b")
@example("**", "a")
@example("a/**", "a")
@example("***", "a/b")
@example("[a-c", "[a-c")
def test_a_glob_matches_what_its_text_says(pattern: str, path: str) -> None:
    if ".." in pattern.split("/") or not set(pattern.split("/")) - {"", "."}:
        return  # refused, which is tested below
    wanted = slow_glob(pattern, path)
    assert sandboxd.glob_matcher(pattern)(path) is wanted
    assert patterns.glob_matcher(pattern)(path) is wanted


@given(st.sampled_from(["/a", "../a", "a/../b", "", ".", "./", "a\0", "[c-a]", "x[b-a]y"]))
def test_a_glob_that_is_none_is_refused(pattern: str) -> None:
    assert outcome(lambda: sandboxd.glob_matcher(pattern)) == "invalid_pattern"
    assert outcome(lambda: patterns.glob_matcher(pattern)) == "invalid_pattern"


@QUICK
@given(st.integers(20, 200))
def test_repeated_stars_mean_one(count: int) -> None:
    for pattern in ("*" * count + "b", "**/" * count + "b"):
        for matcher in (sandboxd.glob_matcher(pattern), patterns.glob_matcher(pattern)):
            assert not matcher("a" * 40)
            assert matcher("b")


# --- searches --------------------------------------------------------------------------------

REFERENCE_IGNORE = """.git .svn .hg .bzr node_modules __pycache__ .venv venv .env env .tox .nox .eggs *.egg-info
site-packages dist build .next .nuxt .output .turbo target out .idea .vscode *.swp *.swo *~ .project .classpath
.settings .DS_Store Thumbs.db desktop.ini *.lnk *.log *.tmp *.temp .upload-*.part *.bak *.cache .cache logs .coverage
coverage .nyc_output htmlcov .pytest_cache .mypy_cache .ruff_cache""".split()  # noqa: SIM905  (as it stands in the reference)


def test_the_ignore_lists_are_the_references() -> None:
    assert list(sandboxd.IGNORE) == REFERENCE_IGNORE
    assert list(patterns.IGNORE) == REFERENCE_IGNORE


def in_order(tree: dict[str, bytes]) -> list[str]:
    """Depth first, each directory sorted by the bytes of its names, nothing that is ignored."""
    kept = [path for path in tree if not any(ignored(name) for name in path.split("/"))]
    return sorted(kept, key=lambda path: [os.fsencode(name) for name in path.split("/")])


def ignored(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in REFERENCE_IGNORE)


def slow_grep(tree: dict[str, bytes], pattern: str, *, literal: bool, exact: bool, glob: str | None, most: int) -> Any:
    matches: list[list[Any]] = []
    skipped = {"large": 0, "binary": 0, "long_lines": 0}
    expression = re.compile(re.escape(pattern) if literal else pattern, 0 if exact else re.IGNORECASE)
    for path in in_order(tree):
        data = tree[path]
        if glob is not None and not slow_glob(glob, path):
            continue
        if len(data) > 1_000_000:
            skipped["large"] += 1
            continue
        if b"\0" in data[:8192]:
            skipped["binary"] += 1
            continue
        text = data.decode("utf-8", errors="replace")
        number = 0
        while text:
            line, _, text = text.partition("\n")
            number += 1
            if len(line) > 2000:
                skipped["long_lines"] += 1
                continue
            line = line.rstrip("\r")
            if expression.search(line):
                if len(matches) == most:
                    return matches, True, skipped
                matches.append([path, number, line[:200] + "..." if len(line) > 200 else line])
    return matches, False, skipped


TREE_NAME = st.sampled_from(
    ["a", "b.py", "c", "x.log", "node_modules", "ü", "-n", "new\nline", "B", "a.py", ".git", "a~"]
)
LINE = st.one_of(
    st.text("aAbB1 \t\r", max_size=8),
    st.sampled_from(
        ["", "ünï", "x" * 200 + "a", "b" * 199, "y" * 2000 + "a", "a" * 2000, "\ufeffa", "a\x0bb\x85c\u2028d"]
    ),
)
CONTENT = st.one_of(
    st.tuples(st.lists(LINE, max_size=6).map("\n".join), st.sampled_from(["", "\n"])).map("".join).map(str.encode),
    st.sampled_from(
        [b"a\0", b"\xff\xfea\n", b"caf\xe9 a\n", b"a" * 9000 + b"\0\na", b"a\n" * 500_001, b"a\n" * 500_000]
    ),
)
TREE = st.dictionaries(st.lists(TREE_NAME, min_size=1, max_size=3).map("/".join), CONTENT, max_size=8)


def fits(tree: dict[str, bytes]) -> dict[str, bytes]:
    """Without the files that others would need as directories."""
    return {path: data for path, data in tree.items() if not any(other.startswith(path + "/") for other in tree)}


@contextmanager
def both(tree: dict[str, bytes]) -> Iterator[tuple[str, MemoryFiles]]:
    """The tree on disk, and in memory."""
    files = MemoryFiles()
    with tempfile.TemporaryDirectory() as top:
        for path, data in tree.items():
            Path(top, path).parent.mkdir(parents=True, exist_ok=True)
            Path(top, path).write_bytes(data)
            files.write(f"{TOP}/{path}", data)
        yield top, files


@pytest.mark.slow  # half a minute
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    TREE.map(fits),
    st.sampled_from(["a", "A", "^a", "b$", "1|ü", r"\s", "[ab]{3}", "(?i)B", ".", "$", "a.b", "ufeff", "\ufffd"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "*.py", "**/a", "a/*", "[!a]", "*"]),
    st.sampled_from([1, 2, 5, 500]),
)
def test_a_search_finds_what_the_reference_says(
    tree: dict[str, bytes], pattern: str, literal: bool, exact: bool, glob: str | None, most: int
) -> None:
    wanted, truncated, skipped = slow_grep(tree, pattern, literal=literal, exact=exact, glob=glob, most=most)
    with both(tree) as (top, files):
        args = {"pattern": pattern, "literal": literal, "case_sensitive": exact, "glob": glob, "max_results": most}
        real = sandboxd.grep_files(top, sandboxd.Args(args))
        mock = files.grep(TOP, pattern, glob=glob, literal=literal, case_sensitive=exact, most=most)
    found = [[os.path.relpath(hit["path"], top), hit["line_number"], hit["line"]] for hit in real["matches"]]
    assert (found, real["truncated"]) == (wanted, truncated)
    assert ([[os.path.relpath(path, TOP), *rest] for path, *rest in mock["matches"]], mock["truncated"]) == (
        wanted,
        truncated,
    )
    if not truncated:
        assert {name: real["skipped"][name] for name in skipped} == skipped
        assert {name: mock["skipped"][name] for name in skipped} == skipped


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREE.map(fits), GLOBS, st.booleans(), st.sampled_from([1, 3, 200]))
def test_a_glob_finds_what_the_reference_says(tree: dict[str, bytes], pattern: str, dirs: bool, most: int) -> None:
    if ".." in pattern.split("/") or not set(pattern.split("/")) - {"", "."}:
        return
    folders = {"/".join(path.split("/")[:depth]) for path in tree for depth in range(1, path.count("/") + 1)}
    known = dict.fromkeys(folders if dirs else (), b"") | tree
    wanted = [path for path in in_order(known) if slow_glob(pattern, path)]
    with both(tree) as (top, files):
        args = sandboxd.Args({"pattern": pattern, "include_dirs": dirs, "max_results": most})
        real = sandboxd.glob_files(top, args)
        mock = files.glob(TOP, pattern, include_dirs=dirs, most=most)
    assert [os.path.relpath(path, top) for path in real["matches"]] == wanted[:most]
    assert [os.path.relpath(path, TOP) for path in mock["paths"]] == wanted[:most]
    assert real["truncated"] is mock["truncated"] is (len(wanted) > most)


# --- reads -----------------------------------------------------------------------------------

MARKS = {"utf-8": b"", "utf-8-sig": codecs.BOM_UTF8, "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE,
         "utf-32-le": codecs.BOM_UTF32_LE, "utf-32-be": codecs.BOM_UTF32_BE}  # fmt: skip
WORDS = st.text("ab\n\r ü日😀\u2028\ufffd", max_size=30)
ENCODED = st.tuples(WORDS, st.sampled_from(sorted(MARKS)))
FIRST = st.sampled_from([None, 1, 2, 3, 9])


def encoded(text: str, encoding: str) -> bytes:
    return MARKS[encoding] + text.encode(encoding.removesuffix("-sig"))


def slow_read(text: str, start: int, end: int | None, most: int | None) -> dict[str, Any]:
    """Whole lines while they fit; the beginning of a first line that does not."""
    lines: list[str] = []
    for char in text:
        if not lines or lines[-1].endswith("\n"):
            lines.append("")
        lines[-1] += char
    wanted = lines[start - 1 : end]
    shown, cut = [], False
    for line in wanted:
        if most is not None and len("".join([*shown, line])) > most:
            if not shown:
                shown, cut = [line[:most]], True
            break
        shown.append(line)
    return {
        "text": "".join(shown),
        "start_line": start,
        "end_line": start + len(shown) - 1,
        "total_lines": len(lines),
        "total_chars": len("".join(wanted)),
        "truncated": "".join(shown) != "".join(wanted),
        "cut_line": cut,
    }


@contextmanager
def small_pieces() -> Iterator[None]:
    """Files are read in pieces of a few bytes, so that pieces end within characters and line ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandboxd, "MIB", 7)
        patch.setattr(sandboxd, "BINARY_PROBE", 5)
        patch.setattr(texts, "_PROBE_BYTES", 5)
        yield


@contextmanager
def one_file(data: bytes) -> Iterator[str]:
    with small_pieces(), tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.name


def really_read(data: bytes, **args: Any) -> dict[str, Any]:
    with one_file(data) as path:
        value = sandboxd.read_decoded(path, sandboxd.Args(args), lambda _size: None)
    value["text"] = sandboxd.unbase64(value.pop("content_b64"), "content").decode()
    value["size_bytes"] = value.pop("size")
    del value["path"]
    return value


def mock_read(data: bytes, start_line: int | None, end_line: int | None, max_chars: int | None, **how: Any) -> Any:
    with small_pieces():
        value, content = texts.read_text(data, "p", start_line, end_line, max_chars, lenient=how.get("lenient", False))
    return {**value, "text": content.decode()}


@QUICK
@given(ENCODED, FIRST, FIRST, st.sampled_from([None, 1, 2, 5, 12, 100]))
def test_text_is_read_as_the_reference_says(
    file: tuple[str, str], start: int | None, end: int | None, most: int | None
) -> None:
    text, encoding = file
    if start is not None and end is not None and start > end:
        return
    data = encoded(text, encoding)
    if encoding == "utf-8" and sandboxd.encoding_of(data)[1]:
        return
    known = {"encoding": encoding, "size_bytes": len(data), "digest": hashlib.sha256(data).hexdigest()}
    wanted = {**slow_read(text, start or 1, end, most), **known}
    assert really_read(data, start_line=start, end_line=end, max_chars=most) == wanted
    assert mock_read(data, start, end, most) == wanted


@QUICK
@given(st.binary(max_size=40) | WORDS.map(str.encode), FIRST, FIRST, st.sampled_from([None, 1, 5, 100]), st.booleans())
def test_any_bytes_are_read_the_same_or_refused_the_same(
    data: bytes, start: int | None, end: int | None, most: int | None, lenient: bool
) -> None:
    args = {"start_line": start, "end_line": end, "max_chars": most, "lenient": lenient}
    real = outcome(lambda: really_read(data, **args))
    if start is not None and end is not None and start > end:
        assert real == "invalid_argument"
        return
    assert real == outcome(lambda: mock_read(data, start, end, most, lenient=lenient))
    if isinstance(real, dict) and not lenient:
        assert "\0" not in real["text"]


@QUICK
@given(
    st.binary(max_size=60).map(lambda data: data.replace(b"\x80", b"\n")), FIRST, FIRST, st.sampled_from([1, 7, 1000])
)
def test_lines_of_bytes_are_what_splitting_gives(data: bytes, start: int | None, end: int | None, limit: int) -> None:
    if start is not None and end is not None and start > end:
        return
    lines = re.findall(rb"[^\n]*\n|[^\n]+\Z", data)
    wanted = b"".join(lines[(start or 1) - 1 : end])
    with one_file(data) as path, open(path, "rb") as file:
        found, count, total, truncated = sandboxd.read_lines(file.fileno(), start or 1, end, limit)
    assert found == wanted[:limit]
    assert truncated is (len(wanted) > limit)
    assert count == found.count(b"\n") + (not found.endswith(b"\n") and bool(found))
    assert total in (None, len(lines))


# --- edits -----------------------------------------------------------------------------------


@QUICK
@given(ENCODED, st.text("ab\nü ", min_size=1, max_size=3), st.text("ab\n日", max_size=3), st.booleans())
def test_a_replacement_keeps_encoding_and_line_ends(file: tuple[str, str], old: str, new: str, every: bool) -> None:
    text, encoding = file
    data = encoded(text, encoding)
    if sandboxd.encoding_of(data)[0] != encoding:
        return
    uniform = "\n" in text and re.search(r"(?<!\r)\n", text) is None
    looked_for, put = (re.sub(r"(?<!\r)\n", "\r\n", part) if uniform else part for part in (old, new))
    count = text.count(looked_for)
    wanted: Any = "no_match" if not count else "ambiguous_match" if count > 1 and not every else None
    if wanted is None:
        wanted = encoded(text.replace(looked_for, put), encoding)
    with one_file(data) as path:
        args = sandboxd.Args({"old": old, "new": new, "replace_all": every})
        told = outcome(lambda: sandboxd.str_replace(path, args)["count"])
        after = Path(path).read_bytes()
        mock = outcome(lambda: texts.replaced(data, old, new, "p", every=every)[1])
    assert (told if isinstance(told, str) else after) == wanted
    assert mock == wanted
    if isinstance(told, str):
        assert after == data
