"""How answers are cut, listed and redacted, for every text and every limit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet.model import GrepMatch, TextRead
from sandfleet.testing.texts import read_text as mock_read
from sandfleet.tools import IGNORE_PATTERNS, plain
from sandfleet.tools.paths import is_ignored, listed, normalise, output_path
from sandfleet.tools.text import (
    bounded_write_error,
    clamp,
    cut_head,
    cut_middle,
    glob_text,
    grep_text,
    one_line,
    read_text,
    redact,
    secrets_of,
)
from sandfleet_workers.sandboxd import sandboxd

TEXTS = st.text(max_size=400)
LIMITS = st.integers(min_value=1, max_value=500)
_MIDDLE = re.compile(r"\n\.\.\. \[middle truncated: (\d+) chars skipped\] \.\.\.\n")


# --- cutting -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(TEXTS, LIMITS)
def test_an_output_is_never_longer_than_its_limit_and_whole_when_it_fits(text: str, limit: int) -> None:
    cut = cut_middle(text, limit)
    assert len(cut) <= limit or limit >= len(text)
    assert (cut == text) == (len(text) <= limit)


@settings(deadline=None)
@given(st.text(alphabet="ab\n", min_size=101, max_size=600), st.integers(min_value=60, max_value=100))
def test_the_middle_notice_counts_exactly_what_is_missing_between_equal_halves(text: str, limit: int) -> None:
    head, skipped, tail = _MIDDLE.split(cut_middle(text, limit))
    assert text.startswith(head)
    assert text.endswith(tail)
    assert int(skipped) == len(text) - len(head) - len(tail)
    assert len(head) - len(tail) in (0, 1)


def test_an_output_with_no_room_for_the_notice_keeps_its_beginning() -> None:
    assert cut_middle("abcdefghij" * 10, 20) == "abcdefghij" * 2


@pytest.mark.parametrize("cut", [cut_middle, cut_head])
def test_a_limit_of_zero_means_none(cut: object) -> None:
    assert cut("x" * 100_000, 0) == "x" * 100_000  # type: ignore[operator]


@settings(deadline=None)
@given(st.lists(st.text(alphabet="abc/", min_size=3, max_size=20), min_size=15, max_size=40), LIMITS)
def test_a_listing_is_cut_at_a_line_end_and_says_so(lines: list[str], limit: int) -> None:
    text = "\n".join(lines)
    cut = cut_head(text, limit)
    assert len(cut) <= max(limit, 0) or cut == text
    if cut == text:
        return
    kept, _, notice = cut.partition("... [truncated")
    assert notice or "... [truncated".startswith(cut)
    if kept and notice:
        whole = kept.removesuffix("\n")
        assert text.startswith(whole + "\n")
        assert f"showing first {len(whole)} of {len(text)} chars" in cut


def test_a_write_error_is_bounded_and_counts_what_is_missing() -> None:
    text = bounded_write_error("Error: Failed to write file 'x': " + "y" * 5000)
    assert len(text) <= 2000
    [skipped] = re.findall(r"\n\.\.\. \[write_file error truncated: (\d+) chars skipped\] \.\.\.\n", text)
    without = re.sub(r"\n\.\.\. \[.*\] \.\.\.\n", "", text)
    assert len(without) + int(skipped) == 5000 + len("Error: Failed to write file 'x': ")


# --- reading files -----------------------------------------------------------------------------


def _read(text: str, start: int | None, end: int | None, limit: int) -> tuple[TextRead, str]:
    value, content = mock_read(text.encode(), "/f", start, end, limit or None, lenient=False)
    read = TextRead(text=content.decode(), **value)
    return read, read_text(read, "/f", start_line=start, end_line=end, max_chars=limit)


LINES = st.lists(st.text(alphabet="abc é", max_size=30), min_size=1, max_size=60) | st.lists(
    st.text(alphabet="abc é", min_size=5, max_size=30), min_size=20, max_size=60
)


@settings(deadline=None)
@given(LINES, st.integers(min_value=1, max_value=900) | st.integers(min_value=115, max_value=200))
def test_a_file_in_parts_is_the_whole_file_and_no_line_is_ever_split(lines: list[str], limit: int) -> None:
    """Follow the notices from part to part, as a model does."""
    text, start, seen = "\n".join([*lines, ""]), 1, list[str]()
    for _ in range(len(lines) + 1):
        _, shown = _read(text, start, None, limit)
        assert len(shown) <= max(limit, len("(empty)"))
        body, found, rest = shown.partition("\n... [truncated: showing lines ")
        if not found:
            if "... [truncated" in shown or "... [truncated".startswith(shown[:14]):
                return  # a line that does not fit, or no room for any notice: told, and tested below
            seen += [""] if shown == "(empty)" else shown.split("\n")
            break
        first, last, low, high, following = map(
            int,
            re.fullmatch(r"(\d+)-(\d+) of (\d+)-(\d+) lines\. Continue with start_line=(\d+)\] \.\.\.", rest).groups(),  # type: ignore[union-attr]
        )
        assert (first, low, high, following) == (start, start, len(lines), last + 1)
        part = body.split("\n")
        assert len(part) == last - first + 1
        seen += part
        start = following
    assert seen == lines


@settings(deadline=None)
@given(st.text(alphabet="abcé", min_size=300, max_size=900), st.integers(min_value=230, max_value=299))
def test_a_huge_line_says_how_to_see_the_rest_of_it_with_cut(line: str, limit: int) -> None:
    _, shown = _read(line, None, None, limit)
    assert len(shown) <= limit
    body, _, notice = shown.partition("\n... [truncated: ")
    assert line.startswith(body)
    [first, last] = map(int, re.findall(r"sed -n '1p' /f \| cut -c (\d+)-(\d+)", notice)[0])
    assert line.encode()[: first - 1] == body.encode()
    assert last >= first


@settings(deadline=None)
@given(st.text(max_size=300), st.integers(min_value=1, max_value=400))
def test_whatever_is_left_out_of_a_file_is_told(text: str, limit: int) -> None:
    if "\0" in text:
        return
    _, shown = _read(text, None, None, limit)
    assert len(shown) <= max(limit, len("(empty)"))
    complete = shown == text or (not text and shown == "(empty)")
    assert complete or "... [truncated" in shown or "... [truncated".startswith(shown[:14])


def test_a_file_too_big_to_count_names_the_next_line_without_a_total() -> None:
    read = TextRead("one\ntwo\n", 1, 2, None, None, True, False, "utf-8", 10**12, None)
    shown = read_text(read, "/f", start_line=None, end_line=None, max_chars=200)
    assert shown == (
        "one\ntwo\n... [truncated: showing lines 1-2, there are more lines. Continue with start_line=3] ..."
    )


def test_a_huge_line_of_a_utf16_file_is_decoded_before_it_is_cut() -> None:
    read = TextRead("x" * 300, 1, 1, 1, 900, True, True, "utf-16-le", 1800, None)
    assert "iconv -t UTF-8 -f UTF-16 '/my file' | sed -n '1p' | cut -c " in read_text(
        read, "/my file", start_line=None, end_line=None, max_chars=300
    )


@settings(deadline=None)
@given(st.text(alphabet="ab é\n", max_size=200), st.integers(1, 12), st.integers(1, 12), st.integers(1, 80))
def test_a_text_read_here_is_what_a_node_reads(text: str, first: int, more: int, limit: int) -> None:
    for start, end, most in ((None, None, limit), (first, first + more, limit), (first, None, None)):
        value, content = mock_read(text.encode(), "/f", start, end, most, lenient=False)
        assert plain.text_read(text, start, end, most) == TextRead(text=content.decode(), **value)


# --- secrets -----------------------------------------------------------------------------------

SECRETS = st.lists(st.text(alphabet="abcXYZ-", min_size=8, max_size=14), min_size=1, max_size=4)


@settings(deadline=None)
@given(SECRETS, st.lists(st.text(alphabet="abcXYZ- \n", max_size=12), max_size=6), LIMITS)
def test_no_secret_survives_redaction_nor_the_cut_after_it(secrets: list[str], around: list[str], limit: int) -> None:
    env = {f"NAME{number}": secret for number, secret in enumerate(secrets)}
    text = "".join(part + secret for part in around for secret in secrets)
    hidden = redact(text, secrets_of(env))
    for secret in secrets:
        assert secret not in hidden
        assert secret not in cut_middle(hidden, limit)


def test_the_longest_secret_goes_first_and_short_values_are_no_secrets() -> None:
    env = {"A": "password", "B": "password-and-more", "C": "short", "D": ""}
    assert secrets_of(env) == ["password-and-more", "password"]
    assert redact("password-and-more password short", secrets_of(env)) == "[redacted] [redacted] short"


def test_a_secret_cut_by_the_node_is_hidden_on_both_sides_of_the_gap() -> None:
    secrets = secrets_of({"TOKEN": "s3cr3t-t0ken-42"})
    gap = "\n... [1000 bytes discarded] ...\n"
    assert redact(f"out s3cr3t-t0{gap}en-42 more s3cr3t", secrets) == f"out [redacted]{gap}[redacted] more s3cr3t"
    assert redact(f"s3c{gap}42", secrets) == f"s3c{gap}42"


# --- search results ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "configured", "most"),
    [(200, 200, 200), (50, 200, 50), (5000, 200, 200), (5000, 5000, 1000), (0, 200, 200), (-1, 20, 20), (10, 0, 10)],
)
def test_the_smaller_of_asked_and_configured_counts_and_nothing_exceeds_the_cap(
    requested: int, configured: int, most: int
) -> None:
    assert clamp(requested, configured, default=200, hard=1000) == most


@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=20))
def test_a_name_with_line_breaks_takes_one_line(names: list[str]) -> None:
    assert len(glob_text("/top", names, False, {}).split("\n")) == len(names) + 1
    assert all("\n" not in one_line(name) and "\x1b" not in one_line(name) for name in names)
    matches = [GrepMatch(name, 1, "line") for name in names]
    assert len(grep_text("/top", matches, False, {}).split("\n")) == len(names) + 1


# --- paths -------------------------------------------------------------------------------------


def test_the_ignore_list_is_the_nodes() -> None:
    assert sorted(IGNORE_PATTERNS) == sorted(sandboxd.IGNORE)


def test_listings_leave_out_ignored_names_below_their_top_only() -> None:
    assert is_ignored("x.egg-info")
    assert not is_ignored("environment")
    top = "/mnt/user-data/workspace/build"
    paths = [f"{top}/a", f"{top}/dist/", f"{top}/dist/b", f"{top}/c/.git/HEAD", f"{top}/c/"]
    assert listed(top, paths) == [f"{top}/a", f"{top}/c/"]
    assert listed(f"{top}/", paths) == listed(top, paths)
    assert listed("build", paths) == listed(top, paths)


@pytest.mark.parametrize(
    "spelling", ["a.txt", "./a.txt", "/workspace/a.txt", "/mnt//user-data/x/../workspace/a.txt", "//workspace/./a.txt"]
)
def test_every_spelling_of_a_file_is_one_path(spelling: str) -> None:
    assert normalise(spelling) == "/mnt/user-data/workspace/a.txt"


@pytest.mark.parametrize(
    "path",
    [
        "/mnt/user-data/outputs",
        "/mnt/user-data/outputs/",
        "/mnt/user-data/outputs/../outputs/a",
        "/mnt/user-data/outputs\\..\\a",
        "/mnt/user-data/outputs-2/a",
        "report.html",
        "/etc/passwd",
        "/mnt/user-data/outputs/a\0b",
    ],
)
def test_nothing_outside_the_outputs_is_presented(path: str) -> None:
    with pytest.raises(ValueError, match="Only files in /mnt/user-data/outputs can be presented"):
        output_path(path)


def test_a_path_in_the_outputs_is_presented_by_its_one_spelling() -> None:
    assert output_path("/mnt/user-data//outputs/./a b.html") == "/mnt/user-data/outputs/a b.html"
