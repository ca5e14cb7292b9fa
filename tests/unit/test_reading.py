"""A reader of output gets each byte once and in order, whatever the stream went through."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet.errors import InvalidArgument
from sandfleet.job_values import OutputChunk, OutputEnd, OutputGap
from sandfleet.reading import Reading
from sandfleet.store.streams import Output


def test_bytes_come_in_order_with_a_cursor_each() -> None:
    reading = Reading()
    records = reading.take([Output(0, 0, b"ab", b"c"), Output(2, 1, b"d"), Output(3, 1, end="ok")])
    assert records == [
        OutputChunk("stdout", b"ab", "2.0"),
        OutputChunk("stderr", b"c", "2.1"),
        OutputChunk("stdout", b"d", "3.1"),
        OutputEnd("ok", "3.1"),
    ]
    assert reading.ended


def test_an_entry_that_was_read_half_gives_its_other_half() -> None:
    assert Reading("2.0").take([Output(0, 0, b"ab", b"c")]) == [OutputChunk("stderr", b"c", "2.1")]
    assert Reading("1.0").take([Output(0, 0, b"ab")]) == [OutputChunk("stdout", b"b", "2.0")]


def test_what_seems_missing_is_looked_for_once_and_then_told() -> None:
    reading = Reading("1.0")
    later = [Output(5, 0, b"x"), Output(6, 2, b"", b"y")]
    assert reading.take(later) == []
    assert reading.read_from == (0, 0)
    assert reading.take(later[:1]) == [OutputGap("stdout", 1, 5, "5.0"), OutputChunk("stdout", b"x", "6.0")]
    assert reading.take(later[1:]) == []
    assert reading.take(later) == [OutputGap("stderr", 0, 2, "6.2"), OutputChunk("stderr", b"y", "6.3")]


def test_a_tail_that_is_missing_is_told_before_the_end() -> None:
    reading = Reading("4.0")
    end = [Output(9, 0, end="ok")]
    assert reading.take(end) == []
    assert reading.take(end) == [OutputGap("stdout", 4, 9, "9.0"), OutputEnd("ok", "9.0")]
    assert OutputGap("stdout", 4, 9, "9.0").missing == 5


@pytest.mark.parametrize("cursor", ["", "1", "1.2.3", "-1.0", "a.b", "1.٢", "1." + "9" * 16])
def test_what_is_no_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidArgument, match="no cursor"):
        Reading(cursor)


def entries(pieces: list[tuple[bytes, bytes]]) -> list[Output]:
    made, out_at, err_at = [], 0, 0
    for out, err in pieces:
        if out or err:
            made.append(Output(out_at, err_at, out, err))
        out_at, err_at = out_at + len(out), err_at + len(err)
    return [*made, Output(out_at, err_at, end="ok")]


def cut(data: bytes, at: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(min(mark, len(data)) for mark in at)})
    return [data[a:b] for a, b in itertools.pairwise(marks)]


_MARKS = st.lists(st.integers(0, 30), max_size=5)


@given(out=st.binary(max_size=30), err=st.binary(max_size=30), first=_MARKS, second=_MARKS, stop=st.integers(0, 6),
       page=st.integers(1, 3))  # fmt: skip
def test_a_stream_made_anew_in_other_pieces_is_read_on_without_a_byte_twice_or_missing(
    out: bytes, err: bytes, first: list[int], second: list[int], stop: int, page: int
) -> None:
    def made(marks: list[int]) -> list[Output]:
        outs, errs = cut(out, marks), cut(err, marks[::-1])
        size = max(len(outs), len(errs))
        return entries(
            [((outs[i] if i < len(outs) else b""), (errs[i] if i < len(errs) else b"")) for i in range(size)]
        )

    got = {"stdout": b"", "stderr": b""}

    def keep(records: list[object]) -> None:
        for record in records:
            assert not isinstance(record, OutputGap)
            if isinstance(record, OutputChunk):
                got[record.stream] += record.data

    reading = Reading()
    keep(list(reading.take(made(first)[:-1][:stop])))
    reading = Reading(reading.cursor)
    for _ in range(200):
        if reading.ended:
            break
        beyond = sum(reading.read_from)
        stream = made(second)
        page_of = [e for e in stream if e.end is not None or e.out_at + len(e.out) + e.err_at + len(e.err) > beyond]
        keep(list(reading.take(page_of[:page])))
    assert reading.ended
    assert got == {"stdout": out, "stderr": err}
