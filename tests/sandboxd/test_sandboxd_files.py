"""Files and searches: exact answers for ordinary trees, quick answers for hostile ones."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest

from tests.sandboxd.conftest import Sandboxd, from_base64

MIB = 1024 * 1024


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_write_creates_parents_and_reads_back_with_its_digest(box: Sandboxd, work: Path) -> None:
    path, body = work / "a/b/c.bin", os.urandom(100_000)
    made = box.put(path, body, "&digest=1").data
    assert made == {"path": str(path), "size": 100_000, "created": True, "digest": sha256(body)}
    answer = box.get(path, "&digest=1")
    assert answer.body == body
    assert answer.headers["x-file-size"] == "100000"
    assert answer.headers["x-file-digest"] == sha256(body)
    assert box.get(path, "&offset=99990&length=100").body == body[99990:]
    assert box.get(path, "&offset=200000").body == b""
    assert box.put(work / "no/such/x", b"", "&create_parents=0").code == "path_not_found"


def test_a_write_keeps_the_mode_and_goes_through_a_symlink(box: Sandboxd, work: Path) -> None:
    target, link = work / "script", work / "link"
    target.write_text("old")
    target.chmod(0o750)
    link.symlink_to("script")
    box.put(link, b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o750
    assert sorted(os.listdir(work)) == ["link", "script"]


def test_appends_are_native_and_keep_the_inode(box: Sandboxd, work: Path) -> None:
    path = work / "log.txt"
    box.put(path, b"one\n", "&append=1")
    inode = path.stat().st_ino
    assert box.put(path, b"two\n", "&append=1").data["size"] == 8
    assert path.read_text() == "one\ntwo\n"
    assert path.stat().st_ino == inode


def test_a_write_with_a_digest_is_compare_and_swap(box: Sandboxd, work: Path) -> None:
    path = work / "f"
    box.put(path, b"1", "&if_digest=absent")
    refused = box.put(path, b"2", "&if_digest=absent")
    assert (refused.code, refused.error["facts"]["digest"]) == ("digest_mismatch", sha256(b"1"))
    assert box.put(path, b"2", f"&if_digest={sha256(b'1')}").data["digest"] == sha256(b"2")
    assert box.put(path, b"3", f"&if_digest={sha256(b'1')}").code == "digest_mismatch"
    assert path.read_bytes() == b"2"


def test_fifty_mebibytes_go_up_and_down_with_flat_memory(box: Sandboxd, work: Path) -> None:
    path, part = work / "big", os.urandom(MIB) * 2
    digest = sha256(part * 25)
    before = box.stats()["rss_bytes"]
    upload = box.post("sandfleet/upload/begin", path=str(path)).data["upload_id"]
    for i in range(25):
        route = f"/v1/sandfleet/upload/chunk?id={upload}&offset={i * len(part)}"
        assert box.request("PUT", route, part).data["received"] == (i + 1) * len(part)
    assert not path.exists()
    made = box.post("sandfleet/upload/commit", id=upload, size=50 * MIB, sha256=digest).data
    assert (made["size"], made["digest"]) == (50 * MIB, digest)
    assert sha256(box.get(path).body) == digest
    assert box.get(path, "&digest=1&length=0").headers["x-file-digest"] == digest
    assert box.stats()["rss_bytes"] - before < 24 * MIB
    assert os.listdir(work) == ["big"]


def test_chunks_may_be_repeated_but_not_skipped_and_the_whole_is_checked(box: Sandboxd, work: Path) -> None:
    path = work / "f"
    path.write_text("old\n")
    upload = box.post("sandfleet/upload/begin", path=str(path), append=True).data["upload_id"]
    chunk = f"/v1/sandfleet/upload/chunk?id={upload}&offset="
    for _ in range(2):
        assert box.request("PUT", chunk + "0", b"abc").data == {"received": 3}
    assert box.request("PUT", chunk + "9", b"x").error["facts"]["received"] == 3
    assert box.request("PUT", chunk + "0", b"xyz").code == "invalid_argument"
    assert box.post("sandfleet/upload/commit", id=upload, sha256=sha256(b"abc")).data["size"] == 7
    assert path.read_text() == "old\nabc"
    wrong = box.post("sandfleet/upload/begin", path=str(path)).data["upload_id"]
    assert box.post("sandfleet/upload/commit", id=wrong, size=5).code == "digest_mismatch"
    dropped = box.post("sandfleet/upload/begin", path=str(path)).data["upload_id"]
    assert box.post("sandfleet/upload/abort", id=dropped).status == 200
    assert os.listdir(work) == ["f"]
    assert box.stats()["uploads"] == 0


@pytest.mark.parametrize(
    ("start_line", "end_line", "content", "total"),
    [(None, None, "a\nb\r\n\nd", 4), (1, 1, "a\n", None), (2, 3, "b\r\n\n", None), (4, None, "d", 4),
     (4, 4, "d", 4), (3, 99, "\nd", 4), (5, None, "", 4), (99, 100, "", 4)],
)  # fmt: skip
def test_lines_are_read_by_number(
    box: Sandboxd, work: Path, start_line: int | None, end_line: int | None, content: str, total: int | None
) -> None:
    (work / "f").write_bytes(b"a\nb\r\n\nd")
    data = box.fs("read", work / "f", start_line=start_line, end_line=end_line).data
    assert (data["content"], data["total_lines"], data["truncated"]) == (content, total, False)
    assert data["lines"] == content.count("\n") + (content[-1:] not in ("\n", ""))


def test_lines_across_read_blocks_agree_with_python(box: Sandboxd, work: Path) -> None:
    lines = [f"{i} {'x' * (i % 3000)}\n" for i in range(3000)]  # four and a half MiB: read by a helper
    (work / "f").write_text("".join(lines))
    for start_line, end_line in ((1, 3), (690, 720), (1390, 1420), (2990, 3000)):
        data = box.fs("read", work / "f", start_line=start_line, end_line=end_line).data
        assert data["content"] == "".join(lines[start_line - 1 : end_line])
        assert data["lines"] == end_line - start_line + 1


def test_a_read_is_cut_at_whole_characters_and_bytes_come_as_base64(box: Sandboxd, work: Path) -> None:
    (work / "f").write_text("ää")
    data = box.fs("read", work / "f", max_bytes=3, digest=True).data
    assert (data["content"], data["truncated"], data["size"]) == ("ä", True, 4)
    assert data["digest"] == sha256("ää".encode())
    (work / "g").write_bytes(b"\xff\xfe\0")
    assert from_base64(box.fs("read", work / "g").data["content_b64"]) == b"\xff\xfe\0"
    (work / "e").write_bytes(b"")
    empty = box.fs("read", work / "e").data
    assert (empty["content"], empty["lines"], empty["total_lines"]) == ("", 0, 0)
    for bad in ({"start_line": 0}, {"end_line": 0}, {"start_line": 3, "end_line": 2}):
        assert box.fs("read", work / "f", **bad).code == "invalid_argument"


def test_special_files_are_refused_at_once(box: Sandboxd, work: Path) -> None:
    os.mkfifo(work / "fifo")
    (work / "zero").symlink_to("/dev/zero")
    (work / "loop").symlink_to("loop")
    begun = time.monotonic()
    for name in ("fifo", "zero"):
        assert box.get(work / name).code == "not_regular_file"
        assert box.put(work / name, b"x").code == "not_regular_file"
        assert box.put(work / name, b"x", "&append=1").code == "not_regular_file"
        assert box.fs("read", work / name).code == "not_regular_file"
        assert box.fs("grep", work / name, pattern="x").code == "not_regular_file"
        assert box.fs("str_replace", work / name, old="a", new="b").code == "not_regular_file"
    assert box.fs("grep", work, pattern="x").data["matches"] == []
    assert box.get(work / "loop").code == "invalid_argument"
    assert box.get(work).code == "is_directory"
    assert box.put(work, b"x").code == "is_directory"
    assert box.get("/etc/passwd/x").code == "not_directory"
    assert box.get(work / "none").code == "path_not_found"
    assert time.monotonic() - begun < 3


def test_a_sparse_terabyte_is_read_in_parts_and_refused_as_a_whole(box: Sandboxd, work: Path) -> None:
    with (work / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    begun = time.monotonic()
    assert box.get(work / "sparse").code == "file_too_large"
    assert box.get(work / "sparse", f"&offset={1 << 39}&length=10").body == bytes(10)
    assert box.fs("read", work / "sparse", max_bytes=100).data["truncated"]
    assert box.fs("read", work / "sparse", start_line=2, timeout=0.3).code == "search_timeout"
    assert box.fs("stat", work / "sparse", digest=True, timeout=0.3).code == "search_timeout"
    assert box.fs("str_replace", work / "sparse", old="a", new="b").code == "file_too_large"
    assert box.fs("grep", work, pattern="x").data["skipped"]["large"] == 1
    assert time.monotonic() - begun < 5


def test_strange_names_travel_both_ways(box: Sandboxd, work: Path) -> None:
    names = [b"-rf", b"line\nbreak", b"\xff\xfe", "\u202eltr".encode(), b"$(id)", b"'; x #"]
    for name in names:
        (Path(os.fsdecode(bytes(work) + b"/" + name))).write_text("here")
    entries = box.fs("list", work).data["entries"]
    assert sorted(os.fsencode(entry["name"]) for entry in entries) == sorted(names)
    for entry in entries:
        assert box.fs("read", entry["path"]).data["content"] == "here"
        assert box.request("GET", "/v1/sandfleet/file?path=" + quote_from_bytes(os.fsencode(entry["path"]))).body
    assert len(box.fs("grep", work, pattern="here").data["matches"]) == len(names)
    for path in ("", "a\0b", "\ud800"):
        assert box.fs("stat", path).code == "invalid_argument"


def test_a_replacement_is_exact_about_how_often_the_text_is_there(box: Sandboxd, work: Path) -> None:
    path = work / "f"
    path.write_text("a\nb a\na\n")
    assert box.fs("str_replace", path, old="zzz", new="y").code == "no_match"
    refused = box.fs("str_replace", path, old="a", new="y")
    assert refused.code == "ambiguous_match"
    assert (refused.error["facts"]["count"], refused.error["facts"]["lines"]) == (3, [1, 2, 3])
    done = box.fs("str_replace", path, old="b ", new="ü").data
    assert (done["count"], done["digest"]) == (1, sha256("a\nüa\na\n".encode()))
    assert box.fs("str_replace", path, old="a", new="", replace_all=True).data["count"] == 3
    assert path.read_text() == "\nü\n\n"
    assert box.fs("str_replace", path, old="", new="y").code == "invalid_argument"
    assert box.fs("str_replace", work / "none", old="a", new="y").code == "path_not_found"


def test_a_listing_is_sorted_bounded_and_honest_about_both(box: Sandboxd, work: Path) -> None:
    (work / "d/e/f").mkdir(parents=True)
    (work / "d/x.txt").write_text("12345")
    (work / "link").symlink_to("/usr")
    data = box.fs("list", work).data
    seen = [(os.path.relpath(e["path"], work), e["type"], e["depth"]) for e in data["entries"]]
    assert seen == [("d", "dir", 1), ("d/e", "dir", 2), ("d/x.txt", "file", 2), ("link", "symlink", 1)]
    assert data["entries"][2]["size"] == 5
    assert data["entries"][3]["target"] == "/usr"
    assert not data["truncated"]
    assert box.fs("list", work, max_entries=3).data["truncated"]
    assert not box.fs("list", work, max_entries=4).data["truncated"]
    assert box.fs("list", work / "none").code == "path_not_found"
    assert box.fs("list", work / "d/x.txt").code == "not_directory"


def test_a_listing_too_long_for_the_server_is_made_by_a_helper(box: Sandboxd, work: Path) -> None:
    for i in range(3000):
        (work / f"f{i:04}").touch()
    assert len(box.fs("list", work).data["entries"]) == 3000
    assert box.fs("list", work, max_entries=10).data["truncated"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.py", ["a/b.py", "a/x/y/b.py", "t.py"]),
        ("a/*.py", ["a/b.py"]),
        ("a/**/b.py", ["a/b.py", "a/x/y/b.py"]),
        ("**/*.py", ["a/b.py", "a/x/y/b.py", "t.py"]),
        ("**", ["a/[z].txt", "a/b.py", "a/x/y/b.py", "t.py"]),
        ("?.py", ["a/b.py", "a/x/y/b.py", "t.py"]),
        ("[!t].py", ["a/b.py", "a/x/y/b.py"]),
        ("[[]z].txt", ["a/[z].txt"]),
        ("*.rs", []),
    ],
)
def test_a_glob_means_what_it_should(box: Sandboxd, work: Path, pattern: str, found: list[str]) -> None:
    for name in ("a/b.py", "a/x/y/b.py", "a/[z].txt", "t.py", "node_modules/m.py"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).touch()
    (work / "link").symlink_to(work / "a")
    (work / "link").unlink() if pattern == "**" else None
    data = box.fs("glob", work, pattern=pattern).data
    assert [os.path.relpath(path, work) for path in data["matches"]] == found
    assert not data["truncated"]


def test_a_glob_says_more_only_when_there_is_more(box: Sandboxd, work: Path) -> None:
    for name in "abc":
        (work / name).touch()
    (work / "dir").mkdir()
    assert box.fs("glob", work, pattern="*", max_results=2).data["truncated"]
    assert not box.fs("glob", work, pattern="*", max_results=3).data["truncated"]
    assert len(box.fs("glob", work, pattern="*", include_dirs=True).data["matches"]) == 4
    for bad in ("/etc/*", "../*", ""):
        assert box.fs("glob", work, pattern=bad).code == "invalid_pattern"
    assert box.fs("glob", work / "a", pattern="*").code == "not_directory"


def test_grep_searches_lines_and_counts_what_it_skipped(box: Sandboxd, work: Path) -> None:
    (work / "a.py").write_text("one\nTwo two\n" + "x" * 500 + " two\r\n")
    (work / "b.txt").write_text("two\n")
    (work / "long").write_text("two" + "y" * 3000 + "\n")
    (work / "bin").write_bytes(b"two\0")
    (work / "huge").write_bytes(b"two\n" * 250_001)
    (work / ".git").mkdir()
    (work / ".git/two").write_text("two")
    (work / "link").symlink_to(work / "b.txt")
    data = box.fs("grep", work, pattern="two").data
    seen = [(os.path.basename(m["path"]), m["line_number"], m["line"]) for m in data["matches"]]
    assert seen == [("a.py", 2, "Two two"), ("a.py", 3, "x" * 200 + "..."), ("b.txt", 1, "two")]
    assert data["skipped"] == {"large": 1, "binary": 1, "long_lines": 1, "errors": 0}
    assert len(box.fs("grep", work, pattern="^t.o", glob="*.py").data["matches"]) == 1
    assert box.fs("grep", work, pattern="^t.o", case_sensitive=True, glob="*.py").data["matches"] == []
    assert box.fs("grep", work, pattern="t.o", literal=True).data["matches"] == []
    assert len(box.fs("grep", work / "b.txt", pattern="two$").data["matches"]) == 1
    assert box.fs("grep", work, pattern="two", max_results=2).data["truncated"]
    assert not box.fs("grep", work, pattern="two", max_results=3).data["truncated"]
    assert box.fs("grep", work, pattern="(").code == "invalid_pattern"


def test_an_expression_that_explodes_is_stopped_and_delays_nobody(box: Sandboxd, work: Path) -> None:
    (work / "f").write_text("a" * 40 + "!\n")
    connection = box.connection()
    body = b'{"do": "grep", "path": "%s", "pattern": "(a+)+$", "timeout": 0.5}' % bytes(work)
    begun = time.monotonic()
    connection.request("POST", "/v1/sandfleet/fs", body, {"Authorization": "Bearer the-token-of-the-tests"})
    assert box.run("echo meanwhile")["stdout"] == "meanwhile\n"
    assert time.monotonic() - begun < 0.4
    assert connection.getresponse().status == 504
    connection.close()
    assert 0.5 <= time.monotonic() - begun < 2
    for i in range(12):
        assert box.fs("glob", work, pattern="**/*a*a*a*a*b" * 2, timeout=2).status == 200, i


def test_moving_removing_and_making_directories(box: Sandboxd, work: Path) -> None:
    assert box.fs("make_dir", work / "d/e").data["created"]
    assert not box.fs("make_dir", work / "d/e").data["created"]
    assert box.fs("make_dir", work / "d/e", exist_ok=False).code == "already_exists"
    (work / "f").write_text("x")
    box.fs("move", work / "f", to=str(work / "new/g"))
    assert (work / "new/g").read_text() == "x"
    assert box.fs("move", work / "new/g", to=str(work / "d"), overwrite=False).code == "already_exists"
    assert box.fs("move", work / "none", to=str(work / "x")).code == "path_not_found"
    assert box.fs("remove", work / "d").code == "invalid_argument"
    (work / "d/link").symlink_to("/usr")
    assert box.fs("remove", work / "d", recursive=True).data["removed"]
    assert Path("/usr/bin").exists()
    assert box.fs("remove", work / "d").code == "path_not_found"
    assert not box.fs("remove", work / "d", missing_ok=True).data["removed"]
    assert not box.fs("exists", work / "d").data["exists"]
    assert box.fs("exists", work).data["type"] == "dir"
    assert box.fs("stat", work / "new/g", digest=True).data["digest"] == sha256(b"x")
    assert box.fs("explode", work).code == "invalid_argument"


def test_the_aio_file_routes_answer_in_their_own_shapes(box: Sandboxd, work: Path) -> None:
    path = str(work / "f.py")
    assert box.post("file/write", file=path, content="a\nb\nc\n").data == {"file": path, "bytes_written": 6}
    assert box.post("file/read", file=path, start_line=1, end_line=2).data["content"] == "b\n"
    assert box.post("file/replace", file=path, old_str="b", new_str="x").data["replaced_count"] == 1
    assert box.post("file/replace", file=path, old_str="nope", new_str="").data["replaced_count"] == 0
    assert box.post("file/search", file=path, regex="x|c").data["line_numbers"] == [2, 3]
    assert box.post("file/find", path=str(work), glob="*.py").data["files"] == [path]
    assert box.post("file/glob", path=str(work), pattern="*.py").data["files"][0]["name"] == "f.py"
    found = box.post("file/grep", path=str(work), pattern="X", case_insensitive=True, include=["*.py"]).data
    assert found["matches"] == [{"file": path, "line_number": 2, "line_content": "x"}]
    assert box.post("file/list", path=str(work)).data["file_count"] == 1
    assert box.request("GET", f"/v1/file/download?path={path}").body == b"a\nx\nc\n"
    form = b'--B\r\nContent-Disposition: form-data; name="path"\r\n\r\n%s\r\n--B\r\n' % (path.encode() + b"2")
    form += b'Content-Disposition: form-data; name="file"; filename="n"\r\n\r\n\r\n\0\xff\r\n--B--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=B"}
    assert box.request("POST", "/v1/file/upload", form, headers=headers).data["file_size"] == 4
    assert Path(path + "2").read_bytes() == b"\r\n\0\xff"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_what_may_not_be_written_is_refused(start: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    (tmp_path / "f").chmod(0o444)
    assert start().put(tmp_path / "f", b"y").code == "permission_denied"
