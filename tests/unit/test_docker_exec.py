"""The pure parts of sandboxes without Python: they must say what sandboxd says, and bear what a container answers."""

from __future__ import annotations

import re
import struct
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet.errors import InvalidPattern, SandfleetError
from sandfleet.testing import patterns as known_patterns
from sandfleet.testing import texts as known_texts
from sandfleet_workers.backends.docker import exec_answers as answers
from sandfleet_workers.backends.docker import exec_patterns as patterns
from sandfleet_workers.backends.docker import exec_scripts as scripts
from sandfleet_workers.backends.docker import exec_texts as texts
from sandfleet_workers.backends.docker.exec_output import Kept, Marked

pytestmark = pytest.mark.slow  # make check runs it


def outcome(work: Any) -> Any:
    """What it gives, or the code and facts of its error."""
    try:
        return work()
    except SandfleetError as exc:
        return exc.code, {name: exc.facts[name] for name in ("count", "lines") if name in exc.facts}


# --- patterns ----------------------------------------------------------------------------------

GLOBS = st.text("ab*?[]!^-/.", min_size=1, max_size=12)
NAMES = st.text("ab]-^!.\n", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))


@given(GLOBS, st.lists(NAMES, min_size=1, max_size=4))
def test_a_glob_finds_what_it_finds_everywhere(pattern: str, names: list[str]) -> None:
    path = "/".join(names)
    wanted = outcome(lambda: known_patterns.glob_matcher(pattern)(path))
    assert outcome(lambda: patterns.glob_matcher(pattern)(path)) == wanted


def test_no_glob_takes_long_whatever_the_name() -> None:
    matches = patterns.glob_matcher("*a" * 200 + "b")
    assert not matches("a" * 255)
    assert not patterns.glob_matcher("**/a/" * 30 + "b")("/".join("a" * 200))
    # So many steps as the product of both lengths, but none of them Python's own: other sandboxes wait meanwhile.
    for pattern, path in (("*" + "a" * 127 + "b", "a" * 255), ("**/" + "a/" * 127 + "b", "a/" * 2000 + "c")):
        matches, steps = patterns.glob_matcher(pattern), 0

        def count(_frame: Any, _event: str, _value: Any) -> Any:
            nonlocal steps
            steps += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            assert not matches(path)
        finally:
            sys.settrace(before)
        assert steps < 100


def test_the_ignored_names_are_the_same_everywhere() -> None:
    assert patterns.IGNORE == known_patterns.IGNORE


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (r"^\s*def \w+\(", r"^[[:space:]]*def [[:alnum:]_]+\("),
        (r"a+?b{2,3}?", "a+b{2,3}"),
        (r"(?:x|y)$", "(x|y)\r?$"),
        (r"[\d.\-_]", "[0-9._-]"),
        (r"[^\s\]]", "[^][:space:]]"),
        (r"[\^]", r"\^"),
        (r"\$\{x\}", r"\$\{x\}"),
        (r"{", r"\{"),
        (r"a\/b\-c", "a/b-c"),
    ],
)
def test_an_expression_is_put_into_grep_s_own_words(pattern: str, wanted: str) -> None:
    assert patterns.basic_expression(pattern) == wanted


@pytest.mark.parametrize("pattern", [r"(?=x)", r"(?P<n>x)(?P=n)", r"(a)\1", "(?i)x", r"[\W]", "x++", "[[:alpha:]]"])
def test_an_expression_that_grep_has_no_words_for_is_told(pattern: str) -> None:
    assert patterns.basic_expression(pattern) == ""


def test_an_expression_that_does_not_parse_is_refused() -> None:
    for pattern in ("(", "[z-a]", "*", "(" * 5000):
        with pytest.raises(InvalidPattern):
            patterns.check_expression(pattern)


# --- texts -------------------------------------------------------------------------------------

PIECES = st.lists(st.sampled_from([b"a", b"\n", b"\r\n", "ü\U0001f600".encode(), b"\xff", b"\0", b"bb"]), max_size=12)
MARKS = st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\xff\xfe\0\0"])
LINES = st.none() | st.integers(1, 6)


@given(MARKS, PIECES, LINES, LINES, st.none() | st.integers(1, 8), st.booleans())
def test_a_text_is_cut_as_everywhere(
    mark: bytes, pieces: list[bytes], start: int | None, end: int | None, most: int | None, lenient: bool
) -> None:
    if start is not None and end is not None and start > end:
        return
    data = mark + b"".join(pieces)
    wanted = outcome(lambda: known_texts.read_text(data, "f", start, end, most, lenient=lenient))
    found = outcome(lambda: texts.text_of(data, "f", start, end, most, lenient=lenient))
    for told in (wanted, found):
        if isinstance(told[1], bytes):  # how far a lenient look goes is not promised
            told[0].update({name: None for name in ("total_lines", "total_chars") if lenient})
    assert found == wanted


@given(
    MARKS,
    PIECES,
    st.sampled_from(["a", "\n", "a\n", "ü", "bb", "\r\n"]),
    st.sampled_from(["", "x\n", "ü"]),
    st.booleans(),
)
def test_a_text_is_edited_as_everywhere(mark: bytes, pieces: list[bytes], old: str, new: str, every: bool) -> None:
    data = mark + b"".join(pieces)
    wanted = outcome(lambda: known_texts.replaced(data, old, new, "f", every=every))
    assert outcome(lambda: texts.replaced(data, old, new, "f", every=every)) == wanted


def test_lines_far_away_are_found() -> None:
    data = b"x\n" * 300_000
    value, content = texts.lines_of(data + b"last", 300_001, None, None)
    assert (content, value["total_lines"]) == (b"last", 300_001)
    assert texts.lines_of(data, 2, 3, None) == ({"size": 600_000, "total_lines": None, "truncated": False}, b"x\nx\n")
    assert texts.lines_of(data, 500_000, None, None)[1] == b""


# --- output ------------------------------------------------------------------------------------


@given(st.integers(0, 9), st.lists(st.binary(max_size=9), max_size=9))
def test_the_first_and_the_last_half_are_kept(cap: int, pieces: list[bytes]) -> None:
    kept = Kept(cap)
    for piece in pieces:
        kept.feed(piece)
    whole = b"".join(pieces)
    if len(whole) <= cap:
        assert (kept.data(), kept.discarded) == (whole, 0)
    else:
        tail = whole[len(whole) - cap // 2 :]
        assert kept.discarded == len(whole) - cap
        assert not cap or kept.parts()[0] + kept.parts()[2] == whole[: cap - cap // 2] + tail


@given(st.lists(st.binary(max_size=20), max_size=5), st.lists(st.integers(1, 30), max_size=20), st.booleans())
def test_our_own_lines_are_cut_out_however_the_bytes_come(pieces: list[bytes], cuts: list[int], header: bool) -> None:
    mark = b"0123456789abcdef"
    output = b"".join(pieces) + mark[:7]
    whole = (mark + b" 42\n" if header else b"") + output + mark + b" 3 exit\n" + b"of others"
    kept = Kept(1000)
    marked = Marked(mark, kept, header=header)
    for cut in cuts:
        marked.feed(whole[:cut])
        whole = whole[cut:]
    marked.feed(whole)
    marked.flush()
    assert (kept.data(), marked.header, marked.trailer) == (output, "42" if header else None, "3 exit")


def test_what_only_looks_like_our_last_line_is_output() -> None:
    kept = Kept(1000)
    marked = Marked(b"0123456789abcdef", kept, header=True)
    marked.feed(b"no header of ours\n0123456789")
    marked.flush()
    assert (kept.data(), marked.header, marked.trailer) == (b"no header of ours\n0123456789", None, None)


# --- answers -----------------------------------------------------------------------------------


@given(
    st.binary(max_size=60) | st.lists(st.sampled_from([b"L./a\0b\0", b"81a4 5 1 ./a//\n", b"x", b"//\n"])).map(b"".join)
)
def test_no_listing_breaks_its_reader(answer: bytes) -> None:
    for read in (
        lambda: answers.entries(answer, "/top", 10),
        lambda: answers.names(answer),
        lambda: answers.matches(answer, "/top", None),
        lambda: answers.entry(answer, "/top"),
    ):
        try:
            read()
        except answers.BadAnswer:
            pass


@given(st.binary(max_size=200))
def test_no_complaint_breaks_its_reader(said: bytes) -> None:
    try:
        assert answers.failure(said, "/f").code
    except answers.BadAnswer:
        pass


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"mkdir: cannot create directory 'x': Read-only file system\n", "read_only"),
        (b"sh: 1: cannot create /x/y: Directory nonexistent\n", "path_not_found"),
        (b"rmdir: 'd': Directory not empty\n", "invalid_argument"),
        (b"cat: write error: No space left on device\n", "no_space"),
        (b"mv: cannot move 'a' to a subdirectory of itself, 'a/b'\n", "invalid_argument"),
        (b"stat: can't stat 'x': Symbolic link loop\n", "invalid_argument"),
        (b"sh: can't fork: Resource temporarily unavailable\n", "resource_limit"),
        (b"sh: 3: sha256sum: not found\n", "not_supported"),
        (b"!digest_mismatch absent\n", "digest_mismatch"),
        (b"something new\n", "internal"),
        (b"", "internal"),
    ],
)
def test_what_tools_complain_of_has_a_code(said: bytes, code: str) -> None:
    assert answers.failure(said, "/f").code == code


def test_an_argument_is_plain_characters_and_reads_back() -> None:
    text = "a b'\"$`\\\n\udcff\u202e*"
    word = scripts.word(text)
    assert re.fullmatch(r"[A-Za-z0-9/._+=,@:\\-]+", word)
    back = re.sub(rb"\\0(\d{3})", lambda match: bytes([int(match[1], 8)]), word.encode())
    assert back == text.encode("utf-8", "surrogateescape")


def test_frames_come_apart_wherever_they_are_cut() -> None:
    stream = pytest.importorskip("sandfleet_workers.backends.docker.exec_stream")
    whole = b"".join(
        struct.pack(">BxxxI", kind, len(data)) + data for kind, data in ((1, b"ab"), (2, b""), (2, b"cde"))
    )
    for step in (1, 3, 100):
        frames, got = stream._Frames(b""), {1: b"", 2: b""}

        def feed(kind: int, data: bytes, got: dict[int, bytes] = got) -> bool:
            got[kind] += data
            return False

        for at in range(0, len(whole), step):
            assert frames.deliver(whole[at : at + step], feed) is False
        assert got == {1: b"ab", 2: b"cde"}
    with pytest.raises(stream.ExecFailed):
        stream._Frames(b"").deliver(b"HTTP/1.1 200 OK", feed)
