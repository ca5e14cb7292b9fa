"""Uploads and downloads over the mock, and what a hostile sandbox may say to a download."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest

from sandfleet import AsyncSandboxProvider, Sandbox, transfer
from sandfleet.client import Answer, Call
from sandfleet.download import _stays_inside, download
from sandfleet.errors import (
    AlreadyExists,
    DigestMismatch,
    InternalError,
    IsDirectory,
    NoSpace,
    NotRegularFile,
    PathNotFound,
    PermissionDenied,
    SandfleetError,
)
from sandfleet.standing import UPLOADS
from sandfleet.steps import Steps, drive
from sandfleet.testing import MockSandboxProvider
from sandfleet.transfer import CHUNK_BYTES, SMALL_BYTES
from tests.services import wait_until

WORK = "/mnt/user-data/workspace"


@pytest.fixture
def sandbox() -> Sandbox:
    provider = MockSandboxProvider()
    found = provider.get(provider.acquire("thread-1"))
    assert found is not None
    return found


@pytest.mark.parametrize("size", [0, 1, SMALL_BYTES, SMALL_BYTES + 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_every_size_arrives_whole(sandbox: Sandbox, tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(os.urandom(size))
    seen: list[tuple[int, int | None]] = []
    sandbox.upload(tmp_path / "f", "d/f", on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (size, size)
    assert [info.name for info in sandbox.list_files("d")] == ["f"]
    sandbox.download("d/f", tmp_path / "new" / "g")
    assert (tmp_path / "new" / "g").read_bytes() == (tmp_path / "f").read_bytes()
    assert os.listdir(tmp_path / "new") == ["g"]


def test_an_upload_that_fails_leaves_what_was_there(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * (3 * CHUNK_BYTES))
    sandbox.write_file("f", "old")
    provider: Any = sandbox._provider
    real = provider.backend.connection(sandbox.id).files
    write, told = real.write, list[int]()

    def full(path: str, data: bytes, **rest: Any) -> Any:
        told.append(len(data))
        if len(told) == 3:
            raise NoSpace("No space left on device", path=path)
        return write(path, data, **rest)

    real.write = full
    with pytest.raises(NoSpace):
        sandbox.upload(tmp_path / "f", "f")
    assert sandbox.read_file("f") == "old"
    assert sandbox.list_dir(WORK) == [f"{WORK}/f"]


def test_a_cancelled_upload_leaves_nothing_and_a_cancelled_thread_upload_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * (3 * CHUNK_BYTES))
    provider = MockSandboxProvider()
    sandbox = provider.get(provider.acquire("thread-1"))
    assert sandbox is not None

    def interrupt(done: int, _total: int | None) -> None:
        if done > CHUNK_BYTES:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sandbox.upload(tmp_path / "f", "f", on_progress=interrupt)
    assert sandbox.list_dir(WORK) == []

    files: Any = provider.backend.connection(sandbox.id).files  # type: ignore[attr-defined]
    write = files.write

    async def cancelled(begin: Callable[[AsyncSandboxProvider], Coroutine[Any, Any, object]]) -> None:
        """While its second piece is on its way."""
        under_way, go_on = threading.Event(), threading.Event()

        def slow(path: str, data: bytes, **rest: Any) -> Any:
            if rest.get("append"):
                under_way.set()
                go_on.wait(5)
            return write(path, data, **rest)

        files.write = slow
        task = asyncio.create_task(begin(AsyncSandboxProvider.over(provider)))
        assert await asyncio.to_thread(under_way.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    def upload(over: AsyncSandboxProvider) -> Coroutine[Any, Any, object]:
        found = over.get(sandbox.id)
        assert found is not None
        return found.upload(tmp_path / "f", "f")

    asyncio.run(cancelled(upload))
    wait_until(lambda: sandbox.list_dir(WORK) == [], 5)
    held = provider._client().holds[sandbox.id]
    asyncio.run(cancelled(lambda over: over.upload_to_thread("thread-1", "f", tmp_path / "f")))
    wait_until(lambda: sandbox.list_dir(UPLOADS) == [], 5)
    wait_until(lambda: provider._client().holds[sandbox.id] == held, 5)


def test_an_empty_path_is_not_this_directory(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private").write_text("x")
    sandbox.write_file("f", "x")
    for copy in (lambda: sandbox.upload("", "new"), lambda: sandbox.download("f", "")):
        with pytest.raises(FileNotFoundError):
            copy()
    for path in (".", tmp_path):
        with pytest.raises(IsADirectoryError):
            sandbox.download("f", path)
    assert os.listdir(tmp_path) == ["private"]
    assert sandbox.list_dir(WORK) == [f"{WORK}/f"]


def test_a_file_that_grows_between_two_looks_comes_into_its_directory_as_that_was_made(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t" / "d").mkdir(parents=True)
    (tmp_path / "t" / "d").chmod(0o700)
    (tmp_path / "t" / "d" / "f").write_text("x")
    monkeypatch.setattr(transfer, "_read_small", lambda _path: None)
    sandbox.upload(tmp_path / "t", "t")
    assert sandbox.stat("t/d").mode & 0o777 == 0o700
    assert sandbox.read_file("t/d/f") == "x"


def test_a_thread_takes_uploads_without_overwriting_and_stays_held(tmp_path: Path) -> None:
    provider = MockSandboxProvider()
    sandbox_id = provider.acquire("t")
    (tmp_path / "big").write_bytes(b"b" * (CHUNK_BYTES + 1))
    paths = [provider.upload_to_thread("t", "a.txt", data) for data in (b"1", b"2", tmp_path / "big")]
    assert [path.rpartition("/")[2] for path in paths] == ["a.txt", "a-1.txt", "a-2.txt"]
    found = provider.get(sandbox_id)
    assert found is not None
    assert found.stat(paths[2]).size == CHUNK_BYTES + 1
    provider.release(sandbox_id)
    assert provider.get(sandbox_id) is None
    with pytest.raises(FileNotFoundError):
        provider.upload_to_thread("other", "a", tmp_path / "none")
    assert [info.thread_id for info in provider.list()] == ["t"], "nothing was acquired for a file that is not there"


def test_stop_and_start_keep_the_thread(sandbox: Sandbox) -> None:
    sandbox.write_file("f", "kept")
    sandbox.stop()
    sandbox.stop()
    sandbox.start()
    sandbox.start()
    assert sandbox.read_file("f") == "kept"
    provider = sandbox._provider
    provider.release(sandbox.id)
    assert provider.get(sandbox.id) is None, "two starts are one hold"


# --- a sandbox that lies ---------------------------------------------------------------------


def info(path: str, kind: str = "file", **more: Any) -> dict[str, Any]:
    return {"path": path, "name": path.rpartition("/")[2], "type": kind, "size": 1, "mode": 0o644, "modified_at": 1.0,
            "target": None, **more}  # fmt: skip


class Liar:
    """Answers a download as it likes."""

    def __init__(self, *entries: dict[str, Any], top: dict[str, Any] | None = None) -> None:
        self.entries, self.top = list(entries), top or info("/top", "dir")
        self.size = 1
        self.unread = 0
        self.stats = self.reads = 0
        self.grows = False
        self.refused: dict[str, SandfleetError] = {}

    def __call__(self, call: Call) -> Steps[Answer]:
        return self._answer(call)

    def _answer(self, call: Call) -> Generator[Any, Any, Answer]:
        yield from ()
        value: Any = {}
        content = None
        if call.kind == "stat":
            self.stats += 1
            value = {**self.top, "modified_at": float(self.stats)}
        elif call.kind == "list_dir":
            value = {"entries": self.entries, "truncated": False, "errors": self.unread}
        elif call.kind == "read_file":
            self.reads += 1
            if call.args["path"] in self.refused:
                raise self.refused[call.args["path"]]
            if self.grows:
                assert self.reads < 1000, "it goes on for ever"
                self.size += CHUNK_BYTES
            content = b"x" * min(call.args["max_bytes"], self.size - call.args["offset"])
            value = {"truncated": call.args["offset"] + len(content) < self.size, "size": self.size}
        elif call.kind == "batch":
            refused = [self.refused.get(item["args"]["path"]) for item in call.args["ops"]]
            results = [{"error": no.to_wire()} if no else {"ok": {}, "content_b64": "eA=="} for no in refused]
            value = {"results": results, "stopped_at": None}
        return Answer("op", value, content)


def fetch(liar: Liar, local: Path) -> Any:
    return drive(download(liar, "/top", local, on_progress=None))


@pytest.mark.parametrize(
    "path",
    ["/etc/evil", "/top", "/top/", "/top/../evil", "/top/..", "/top/a/../../evil", "/top//evil", "/top/./evil",
     "/top/sub/evil", "/topevil", "evil", "/top/a\0b", "/top/\ud800"],
)  # fmt: skip
def test_a_listing_cannot_name_anything_outside(tmp_path: Path, path: str) -> None:
    (tmp_path / "out" / "sub").mkdir(parents=True)
    for kind in ("file", "dir", "symlink"):
        with pytest.raises(InternalError, match="listed"):
            fetch(Liar(info(path, kind, target="x")), tmp_path / "out")
    assert [str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*")] == ["out", "out/sub"]


def test_nothing_is_written_through_a_link_that_was_there_or_that_came(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.mkdir()
    (out / "d").symlink_to(outside)
    with pytest.raises(FileExistsError):
        fetch(Liar(info("/top/d", "dir"), info("/top/d/f")), out)
    with pytest.raises(InternalError):
        fetch(Liar(info("/top/d/f")), out)
    with pytest.raises(InternalError):
        fetch(Liar(info("/top/l", "symlink", target="."), info("/top/l/f")), out)
    (out / "f").symlink_to(outside / "f")
    fetch(Liar(info("/top/f")), out)
    assert not (out / "f").is_symlink()
    assert os.listdir(outside) == []


@pytest.mark.parametrize(
    ("link", "target", "inside"),
    [
        ("l", "f", True), ("l", "d/f", True), ("d/l", "../f", True), ("a/b/l", "../../f", True), ("l", "./f", True),
        ("l", ".", True), ("d/l", "..", True),
        ("l", "..", False), ("l", "/etc/passwd", False), ("l", "../f", False), ("d/l", "../../f", False),
        ("l", "c/..", False), ("d/l", "../c/../..", False), ("l", "", False), ("l", "a\0", False),
        ("l", "\udcff", True), ("l", "\ud800", False),
    ],
)  # fmt: skip
def test_links_stay_inside_whatever_other_links_there_are(link: str, target: str, inside: bool) -> None:
    assert _stays_inside(link, target) is inside


def test_links_that_lead_out_are_told_and_left_away(tmp_path: Path) -> None:
    got = fetch(
        Liar(info("/top/l", "symlink", target="/etc/passwd"), info("/top/x", "other"), info("/top/f")), tmp_path
    )
    assert os.listdir(tmp_path) == ["f"]
    assert (got.files, got.links, len(got.skipped)) == (1, 0, 2)


def test_a_large_file_that_never_stands_still_is_given_up_and_leaves_nothing(tmp_path: Path) -> None:
    liar = Liar(top=info("/top", size=CHUNK_BYTES + 5))
    liar.size = CHUNK_BYTES + 5
    with pytest.raises(DigestMismatch, match="changes while"):
        fetch(liar, tmp_path / "f")
    assert os.listdir(tmp_path) == []


def test_a_file_that_grows_as_fast_as_it_is_read_is_given_up(tmp_path: Path) -> None:
    liar = Liar(top=info("/top", size=CHUNK_BYTES + 5))
    liar.grows = True
    with pytest.raises(DigestMismatch, match="changes while"):
        fetch(liar, tmp_path / "f")
    assert liar.reads < 20
    assert os.listdir(tmp_path) == []


def test_a_file_that_has_grown_beyond_one_piece_is_not_cut_there(tmp_path: Path) -> None:
    liar = Liar(top=info("/top", size=SMALL_BYTES + 1))
    liar.size = CHUNK_BYTES + 5
    with pytest.raises(DigestMismatch):  # its size is told wrong again and again
        fetch(liar, tmp_path / "f")
    assert os.listdir(tmp_path) == []


def test_what_is_no_file_any_more_is_told_and_the_rest_comes(tmp_path: Path) -> None:
    entries = [info(f"/top/{name}") for name in "abcde"] + [info("/top/large", size=SMALL_BYTES + 1)]
    liar = Liar(*entries)
    kinds = [PathNotFound, NotRegularFile, IsDirectory, PermissionDenied]
    liar.refused = {f"/top/{name}": kind("no") for name, kind in zip("abcd", kinds, strict=True)}
    liar.refused["/top/large"] = IsDirectory("no")
    got = fetch(liar, tmp_path)
    assert os.listdir(tmp_path) == ["e"]
    assert [line.split(":")[0] for line in got.skipped] == ["/top/large", "/top/a", "/top/b", "/top/c", "/top/d"]
    liar.refused["/top/e"] = NoSpace("a fault is no reason to go on")
    with pytest.raises(NoSpace):
        fetch(liar, tmp_path)


def test_directories_that_could_not_be_read_are_told(tmp_path: Path) -> None:
    liar = Liar(info("/top/f"))
    liar.unread = 2
    assert fetch(liar, tmp_path).skipped == ("/top: 2 directories below it could not be read",)


def test_modes_cannot_make_a_file_setuid(tmp_path: Path) -> None:
    fetch(Liar(info("/top/f", mode=0o6777)), tmp_path)
    assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o777


def test_what_cannot_be_copied_is_told(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(PathNotFound):
        sandbox.download("none", tmp_path / "f")
    with pytest.raises(NotRegularFile):
        fetch(Liar(top=info("/top", "other")), tmp_path / "f")
    sandbox.make_link("l", "a")
    with pytest.raises(AlreadyExists):
        sandbox.make_link("l", "b")
    assert os.listdir(tmp_path) == []
