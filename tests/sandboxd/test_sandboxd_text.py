"""Decoded reads, edits that keep encodings, links, appends to a known size, and what a sandbox uses."""

from __future__ import annotations

import codecs
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxd.conftest import Sandboxd, from_base64, wait_until

MIB = 1024 * 1024


def text(box: Sandboxd, path: Path, **fields: Any) -> tuple[str, Any]:
    data = box.fs("text", path, **fields).data
    return from_base64(data["content_b64"]).decode(), data


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-32-be"])
def test_a_large_text_is_read_by_a_helper_in_any_encoding(box: Sandboxd, work: Path, encoding: str) -> None:
    mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-32-be": codecs.BOM_UTF32_BE}.get(encoding, b"")
    lines = [f"{number} grün \U0001f600 {'x' * (number % 97)}\n" for number in range(40_000)]
    raw = mark + "".join(lines).encode(encoding)
    (work / "f").write_bytes(raw)
    shown, data = text(box, work / "f", start_line=20_001, end_line=39_000, max_chars=1_000_000)
    assert shown == "".join(lines[20_000 : data["end_line"]])
    assert 1_000_000 - 120 < len(shown) <= 1_000_000
    assert data["truncated"]
    assert data["total_lines"] == 40_000
    assert data["total_chars"] == len("".join(lines[20_000:39_000]))
    assert data["digest"] == hashlib.sha256(raw).hexdigest()
    assert (data["encoding"], data["size"], data["cut_line"]) == (encoding, len(raw), False)


def test_what_is_beyond_the_scan_limit_is_not_known_and_costs_no_time(box: Sandboxd, work: Path) -> None:
    with (work / "f").open("wb") as file:
        file.write(b"line\n" * 3000)
        file.truncate(200 * MIB)
    began = time.monotonic()
    shown, data = text(box, work / "f", start_line=2, max_chars=12)
    assert time.monotonic() - began < 1.0
    assert (shown, data["end_line"], data["truncated"]) == ("line\nline\n", 3, True)
    assert (data["total_lines"], data["total_chars"], data["digest"]) == (None, None, None)
    assert text(box, work / "f", start_line=2, end_line=3)[1]["total_chars"] == 10
    assert box.fs("text", work / "f", start_line=3001).code == "binary_file"


def test_a_huge_line_is_cut_and_memory_stays_flat(box: Sandboxd, work: Path) -> None:
    (work / "f").write_bytes(b"x" * (60 * MIB))
    before = box.stats()["rss_bytes"]
    shown, data = text(box, work / "f", max_chars=10)
    assert (shown, data["cut_line"], data["total_lines"], data["total_chars"]) == ("x" * 10, True, 1, 60 * MIB)
    assert box.stats()["rss_bytes"] - before < 8 * MIB


def test_pseudo_files_and_what_is_no_file_are_answered(box: Sandboxd, work: Path) -> None:
    assert "Name:" in text(box, Path("/proc/self/status"))[0]
    os.mkfifo(work / "fifo")
    assert box.fs("text", work / "fifo").code == "not_regular_file"
    assert box.fs("text", work).code == "is_directory"
    assert box.fs("text", work / "none").code == "path_not_found"
    assert box.fs("text", work / "none", start_line=2, end_line=1).code == "invalid_argument"
    assert box.fs("text", work / "none", max_chars=0).code == "invalid_argument"


def test_an_append_to_a_known_size_is_done_once(box: Sandboxd, work: Path) -> None:
    path = work / "d" / "f"
    assert box.put(path, b"x", "&append=1&if_size=1").error["facts"]["size"] == 0
    assert not path.parent.exists()
    assert box.put(path, b"abc", "&append=1&if_size=0").data["size"] == 3
    assert box.put(path, b"def", "&append=1&if_size=3&mode=640").data["size"] == 6
    assert box.put(path, b"def", "&append=1&if_size=3").code == "digest_mismatch"
    assert box.put(path, b"def", "&if_size=6").code == "invalid_argument"
    assert path.read_bytes() == b"abcdef"
    assert path.stat().st_mode & 0o777 == 0o640


def test_links_are_made_replaced_and_never_anything_else(box: Sandboxd, work: Path) -> None:
    link = work / "sub" / "l"
    assert box.fs("make_link", link, target="nowhere").data == {"path": str(link), "target": "nowhere"}
    assert box.fs("make_link", link, target="x").code == "already_exists"
    box.fs("make_link", link, target="f", overwrite=True)
    assert os.readlink(link) == "f"
    (work / "f").write_text("kept")
    assert box.fs("make_link", work / "f", target="x", overwrite=True).code == "already_exists"
    for target in ("", "a\0"):
        assert box.fs("make_link", work / "m", target=target).code == "invalid_argument"
    assert box.fs("make_link", work / "m", target=7).code == "invalid_argument"
    assert sorted(os.listdir(work / "sub")) == ["l"]


def test_a_move_may_go_through_a_link(box: Sandboxd, work: Path) -> None:
    for name in ("a", "b", "real"):
        (work / name).write_text(name)
    (work / "link").symlink_to("real")
    box.fs("move", work / "a", to=str(work / "link"), follow=True)
    assert ((work / "real").read_text(), (work / "link").is_symlink()) == ("a", True)
    box.fs("move", work / "b", to=str(work / "link"))
    assert ((work / "link").read_text(), (work / "link").is_symlink()) == ("b", False)
    assert box.fs("move", work / "link", to=str(work / "real" / "x")).code == "not_directory"


def test_a_directory_is_not_emptied_under_a_name_it_cannot_be_removed_by(box: Sandboxd, work: Path) -> None:
    (work / "d").mkdir()
    (work / "d" / "f").write_text("kept")
    for path in (f"{work}/d/.", f"{work}/d/..", f"{work}/d/./"):
        assert box.fs("remove", path, recursive=True).code == "invalid_argument"
    assert (work / "d" / "f").read_text() == "kept"


def test_usage_counts_what_runs_and_what_has_ended(start: Any) -> None:
    box = start()
    quiet = box.stats()
    assert quiet["disk_bytes"] is None
    box.run("head -c 2000000 /dev/zero > zeros; i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
    job = box.run("sleep 60", async_mode=True)["op_id"]
    used = wait_until(lambda: (found := box.stats())["pids"] > quiet["pids"] and found)
    assert used["cpu_s"] >= quiet["cpu_s"] + 0.01
    assert used["cpu_percent"] >= 0
    assert used["memory_bytes"] > quiet["memory_bytes"]
    box.post("bash/kill", op_id=job, signal="SIGKILL")
    told = box.request("GET", "/v1/sandfleet/stats?disk=1").data
    assert told["disk_bytes"] >= 2_000_000
    assert told["network_bytes"] in (0, None)
