"""Manifests: what is written is read again, and nothing that a storage says is believed before it was looked at."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet.errors import CheckpointCorrupt
from sandfleet_workers.checkpoints.manifest import (
    DIRECTORY,
    FILE,
    HEAD_BYTES,
    LINK,
    PIECE_BYTES,
    Entry,
    Manifest,
    ManifestName,
    Piece,
    decode,
    decode_summary,
    encode,
    newest,
    told_skipped,
)

NAME = ManifestName(7, 1, "0123456789abcdef")
DIGEST = hashlib.sha256(b"x").hexdigest()
MANIFEST = Manifest(
    name=NAME,
    thread_id="t",
    user_id="u",
    saved_at_ms=1_800_000_000_123,
    parent="fedcba9876543210",
    label="by hand",
    consistent=True,
    skipped=("pipe: a pipe",),
    entries=(
        Entry("workspace", DIRECTORY, 0o755, 5),
        Entry("workspace/a", FILE, 0o640, -5, (Piece(1, DIGEST), Piece(4096, ""))),
        Entry("workspace/b", LINK, target="../../etc/passwd"),
    ),
)


def test_what_is_written_is_read_again() -> None:
    data = encode(MANIFEST)
    assert decode(NAME, data) == MANIFEST
    assert decode_summary(NAME, data[:HEAD_BYTES], len(data)) == MANIFEST.summary()
    assert (MANIFEST.data_bytes, MANIFEST.digests()) == (1, {DIGEST})


@given(st.binary(min_size=1, max_size=20), st.integers(-(2**63) + 1, 2**63 - 1), st.integers(0, 0o777))
def test_odd_names_survive(name: bytes, mtime_ns: int, mode: int) -> None:
    name = name.replace(b"/", b"-").replace(b"\0", b"-")
    if name in (b".", b".."):
        return
    text = name.decode("utf-8", "surrogateescape")
    odd = replace(MANIFEST, entries=(Entry(text, DIRECTORY, mode, mtime_ns), Entry(f"{text}/l", LINK, target=text)))
    assert decode(NAME, encode(odd)) == odd


@given(st.data())
def test_a_manifest_that_is_cut_or_changed_anywhere_is_refused(data: st.DataObject) -> None:
    whole = encode(MANIFEST)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for bad in (whole[:at], changed, whole + b"x"):
        with pytest.raises(CheckpointCorrupt):
            decode(NAME, bad)


def forged(rows: Any, **summary: Any) -> bytes:
    """A manifest with right digests, as whoever can write to the storage makes it."""
    fields = {**MANIFEST.summary().to_wire(), "v": 1, "seq": 1, **summary}
    lines = [json.dumps(value).encode() + b"\n" for value in (fields, rows)]
    digests = " ".join(hashlib.sha256(line).hexdigest() for line in lines)
    return f"sandfleet-checkpoint 1 {digests} {len(lines[1])}\n".encode() + b"".join(lines)


ROOM = ["d", "d", 0o755, 0]
HOSTILE = {
    "absolute": [["/etc/cron.d/x", "f", 0o644, 0, []]],
    "up": [["../x", "f", 0o644, 0, []]],
    "up within": [ROOM, ["d/../../x", "f", 0o644, 0, []]],
    "dot": [["./x", "f", 0o644, 0, []]],
    "empty": [["", "d", 0o755, 0]],
    "double slash": [ROOM, ["d//x", "f", 0o644, 0, []]],
    "NUL": [["a\0b", "f", 0o644, 0, []]],
    "long name": [["a" * 256, "f", 0o644, 0, []]],
    "long path": [["/".join(["a" * 200] * 30), "d", 0o755, 0]],
    "through a link": [["l", "l", "/etc"], ["l/passwd", "f", 0o644, 0, []]],
    "a link, then the directory": [["l", "l", "/etc"], ["l", "d", 0o755, 0], ["l/x", "f", 0o644, 0, []]],
    "twice": [["x", "f", 0o644, 0, []], ["x", "l", "y"]],
    "no parent": [["d/x", "f", 0o644, 0, []]],
    "below a file": [["x", "f", 0o644, 0, []], ["x/y", "f", 0o644, 0, []]],
    "child before parent": [["d/x", "f", 0o644, 0, []], ROOM],
    "device": [["x", "b", 0o644, 0, []]],
    "hard link": [["x", "h", "/etc/passwd"]],
    "link to nothing": [["x", "l", ""]],
    "link with NUL": [["x", "l", "a\0b"]],
    "huge piece": [["x", "f", 0o644, 0, [[PIECE_BYTES + 1, DIGEST]]]],
    "huge file": [["x", "f", 0o644, 0, [[2**53, ""], [2**53, ""]]]],
    "negative": [["x", "f", 0o644, 0, [[-1, DIGEST]]]],
    "true": [["x", "f", True, 0, []]],
    "no digest": [["x", "f", 0o644, 0, [[1, "../../../etc/passwd"]]]],
    "time": [["x", "f", 0o644, 2**70, []]],
    "not a list": {"x": 1},
    "not rows": ["x"],
    "number": 7,
    "deep": "[" * 100,
}


@pytest.mark.parametrize("rows", HOSTILE.values(), ids=HOSTILE)
def test_what_no_checkpoint_may_hold_is_refused(rows: Any) -> None:
    with pytest.raises(CheckpointCorrupt):
        decode(NAME, forged(rows))


def test_no_special_bit_comes_out_of_a_manifest() -> None:
    (entry,) = decode(NAME, forged([["x", "f", 0o7777, 0, []]])).entries
    assert entry.mode == 0o777


@pytest.mark.parametrize(
    "summary",
    [
        {"id": "f" * 16},
        {"epoch": 8},
        {"seq": 2},
        {"thread_id": "../x"},
        {"parent": "x"},
        {"files": None},
        {"skipped": 1},
    ],
    ids=str,
)
def test_a_summary_that_is_another_ones_is_refused(summary: dict[str, Any]) -> None:
    with pytest.raises(CheckpointCorrupt):
        decode(NAME, forged([], **summary))


def test_a_new_owners_checkpoints_are_newer_than_all_of_the_old_one() -> None:
    old, new = ManifestName(7, 99, "f" * 16), ManifestName(8, 1, "0" * 16)
    assert newest([old, new]) == [new, old]
    assert sorted(map(str, (old, new))) == [str(old), str(new)]
    assert ManifestName.parse(str(old)) == old
    for other in ("x.json", f"{old}.part", f".{old}", str(old).upper()):
        assert ManifestName.parse(other) is None


def test_what_was_left_out_is_told_and_bounded() -> None:
    told = told_skipped([f"{'n' * 500}{number}: a pipe" for number in range(1000)])
    assert len(told) == 51
    assert told[-1] == "and 950 more"
    data = encode(replace(MANIFEST, skipped=told))
    assert decode(NAME, data).skipped == told
