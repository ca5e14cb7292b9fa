"""The part of the backend contract about texts, links and what else files can do; see `backend_contract`."""

from __future__ import annotations

import codecs
import hashlib
from typing import Any

import pytest

from sandfleet.backends import Connection
from sandfleet.testing.backend_world import World

__all__ = ["TextContract"]


class TextContract:
    """Mixed into `BackendContract`, which gives the fixtures."""

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
    def test_text_is_read_in_whole_lines_whatever_its_encoding(
        self, world: World, files: Connection, encoding: str
    ) -> None:
        text = "eins\r\nzw\U0001f600i\n\ndreiß"
        raw = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE, "utf-32-le": codecs.BOM_UTF32_LE,
               "utf-32-be": codecs.BOM_UTF32_BE}.get(encoding, b"") + text.encode(encoding)  # fmt: skip
        world.value(files, "write_file", raw, path="f")
        known = {"total_lines": 4, "encoding": encoding, "size_bytes": len(raw),
                 "digest": hashlib.sha256(raw).hexdigest()}  # fmt: skip

        def read(**args: Any) -> tuple[str, dict[str, Any]]:
            completion = world.do(files, "read_file", path="f", as_text=True, **args)
            assert completion.error is None, completion.error
            assert {name: completion.value.pop(name) for name in known} == known
            return (completion.content or b"").decode(), completion.value

        def lines(first: int, last: int, chars: int, *, truncated: bool = False, cut: bool = False) -> dict[str, Any]:
            return {"start_line": first, "end_line": last, "total_chars": chars, "truncated": truncated,
                    "cut_line": cut}  # fmt: skip

        assert read() == (text, lines(1, 4, 17))
        assert read(start_line=2, end_line=3) == ("zw\U0001f600i\n\n", lines(2, 3, 6))
        assert read(start_line=5) == ("", lines(5, 4, 0))
        assert read(max_chars=11) == ("eins\r\nzw\U0001f600i\n", lines(1, 2, 17, truncated=True))
        assert read(max_chars=10) == ("eins\r\n", lines(1, 1, 17, truncated=True))
        assert read(max_chars=3, start_line=2) == ("zw\U0001f600", lines(2, 2, 11, truncated=True, cut=True))
        assert read(max_chars=17) == (text, lines(1, 4, 17))

    def test_what_is_no_text_is_told_and_read_only_leniently(self, world: World, files: Connection) -> None:
        for raw in (b"a\0b", b"\xff\xfea", b"caf\xe9\n", b"x" * 9000 + b"\xff", b"\xff\xfe\0\xd8"):
            world.value(files, "write_file", raw, path="f")
            assert world.code(files, "read_file", path="f", as_text=True) == "binary_file", raw[:10]
        world.value(files, "write_file", b"a\n" * 5000 + b"caf\xe9\n", path="f")
        assert world.code(files, "read_file", path="f", as_text=True, start_line=5001) == "binary_file"
        shown = world.do(files, "read_file", path="f", as_text=True, end_line=2)
        assert (shown.content, shown.value["total_lines"]) == (b"a\na\n", 5001)
        read = world.do(files, "read_file", path="f", as_text=True, lenient=True, start_line=5001)
        assert (read.content, read.value["end_line"]) == ("caf\ufffd\n".encode(), 5001)
        world.value(files, "write_file", b"", path="f")
        empty = world.do(files, "read_file", path="f", as_text=True)
        assert (empty.content, empty.value["end_line"], empty.value["total_lines"]) == (b"", 0, 0)

    def test_text_is_replaced_in_its_own_encoding_and_line_ends(self, world: World, files: Connection) -> None:
        for encoding, mark in (("utf-16-le", codecs.BOM_UTF16_LE), ("utf-32-be", codecs.BOM_UTF32_BE)):
            world.value(files, "write_file", mark + "grün\r\nrot\r\n".encode(encoding), path="f")
            value = world.value(files, "str_replace", path="f", old="grün\nrot", new="a\nb\nc")
            wanted = mark + "a\r\nb\r\nc\r\n".encode(encoding)
            assert value == {"count": 1, "digest": hashlib.sha256(wanted).hexdigest()}
            assert world.read(files, "f") == wanted
        for raw, wanted in ((b"a\r\nb\r\n", b"a\r\nx\r\ny\r\n"), (b"a\r\nb\n", b"a\r\nx\ny\n")):
            world.value(files, "write_file", raw, path="f")
            world.value(files, "str_replace", path="f", old="b\n", new="x\ny\n")
            assert world.read(files, "f") == wanted
        for raw in (b"a\0b\0", b"\xff\xfea\0\0"):
            world.value(files, "write_file", raw, path="f")
            assert world.code(files, "str_replace", path="f", old="a", new="b") == "binary_file"
            assert world.read(files, "f") == raw

    def test_if_digest_edits_only_what_was_read(self, world: World, files: Connection) -> None:
        first = world.value(files, "write_file", b"a\nb\n", path="f")["digest"]
        # Whether the text occurs in another version is not told.
        for old, stale in (("a", ""), ("a", "0" * 64), ("z", "0" * 64)):
            code = world.code(files, "str_replace", path="f", old=old, new="c", if_digest=stale)
            assert code == "digest_mismatch"
        assert world.read(files, "f") == b"a\nb\n"
        assert world.code(files, "str_replace", path="f", old="z", new="c", if_digest=first) == "no_match"
        second = world.value(files, "str_replace", path="f", old="a", new="c", if_digest=first.upper())["digest"]
        assert world.code(files, "str_replace", path="f", old="c", new="d", if_digest=first) == "digest_mismatch"
        assert world.value(files, "str_replace", path="f", old="c", new="d", if_digest=second)["count"] == 1
        assert world.read(files, "f") == b"d\nb\n"
        assert world.code(files, "str_replace", path="none", old="a", new="b", if_digest=first) == "path_not_found"

    def test_a_part_of_a_file_is_read_by_its_offset(self, world: World, files: Connection) -> None:
        world.value(files, "write_file", b"0123456789", path="f")
        part = world.do(files, "read_file", path="f", offset=3, max_bytes=4)
        assert (part.content, part.value) == (b"3456", {"size": 10, "total_lines": None, "truncated": True})
        rest = world.do(files, "read_file", path="f", offset=7, max_bytes=4)
        assert (rest.content, rest.value["truncated"]) == (b"789", False)
        assert world.do(files, "read_file", path="f", offset=99).content == b""

    def test_an_append_to_a_known_size_is_not_done_twice(self, world: World, files: Connection) -> None:
        assert world.value(files, "write_file", b"ab", path="d/f", append=True, if_size=0)["size"] == 2
        assert world.code(files, "write_file", b"ab", path="d/f", append=True, if_size=0) == "digest_mismatch"
        assert world.value(files, "write_file", b"c", path="d/f", append=True, if_size=2, mode=0o600)["size"] == 3
        assert world.read(files, "d/f") == b"abc"
        assert world.value(files, "stat", path="d/f")["mode"] == 0o600

    def test_links_are_links(self, world: World, files: Connection) -> None:
        world.value(files, "write_file", b"there", path="d/f")
        world.value(files, "make_link", path="l", target="d/f")
        world.value(files, "make_link", path="broken", target="nowhere")
        assert world.read(files, "l") == b"there"
        followed, itself = (world.value(files, "stat", path="l", follow=follow) for follow in (True, False))
        assert (followed["type"], followed["size"], followed["target"]) == ("file", 5, "d/f")
        assert (itself["type"], itself["target"]) == ("symlink", "d/f")
        assert world.code(files, "stat", path="broken") == "path_not_found"
        assert world.value(files, "stat", path="broken", follow=False)["target"] == "nowhere"
        assert world.code(files, "make_link", path="l", target="x") == "already_exists"
        assert world.code(files, "make_link", path="d/f", target="x", overwrite=True) == "already_exists"
        world.value(files, "make_link", path="l", target="d", overwrite=True)
        listed = world.value(files, "list_dir", path=".", max_depth=3)["entries"]
        assert [(entry["name"], entry["type"]) for entry in listed] == [
            ("broken", "symlink"), ("d", "dir"), ("f", "file"), ("l", "symlink"),
        ]  # fmt: skip
        world.value(files, "remove", path="l", recursive=True)
        assert world.read(files, "d/f") == b"there"

    def test_metrics_have_numbers_or_nothing(self, world: World, files: Connection) -> None:
        world.value(files, "write_file", b"x" * 100_000, path="f")
        used = world.value(files, "metrics")
        assert set(used) <= {"cpu_s", "cpu_percent", "memory_bytes", "pids", "disk_bytes", "network_in_bytes",
                             "network_out_bytes", "uptime_s"}  # fmt: skip
        assert all(value is None or value >= 0 for value in used.values())
        assert used.get("disk_bytes") is None or used["disk_bytes"] >= 100_000
