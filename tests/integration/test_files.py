"""Files and the life of a sandbox through a real fleet: odd names, trees, large files, stop and start."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet import AsyncSandboxProvider, Batch, Sandbox, SandboxProvider
from sandfleet.errors import (
    AlreadyExists,
    BinaryFile,
    DigestMismatch,
    InvalidArgument,
    NoMatch,
    PathNotFound,
    SandfleetError,
)
from sandfleet.stack import Stack
from tests.services import wait_until

WORK = "/mnt/user-data/workspace"
MIB = 1024 * 1024
ODD = [
    "new\nline",
    "-rf",
    "--",
    "ünï 日本",
    " ",
    "\udcff\udcfe",
    "*",
    "$(id)",
    "a\tb",
    "\x1b[31m",
    "q'\"",
    "back\\slash",
    "%2e%2e",
]


@pytest.fixture
def sandbox(provider: SandboxProvider, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    sandbox_id = provider.acquire(f"files-{abs(hash(request.node.name)):x}"[:40])
    found = provider.get(sandbox_id)
    assert found is not None
    yield found
    provider.destroy(found.id, delete_data=True)


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_any_name_a_kernel_takes_works_in_every_call(sandbox: Sandbox, name: str) -> None:
    folder, path = f"{WORK}/{name}", f"{WORK}/{name}/{name}"
    sandbox.make_dir(folder)
    sandbox.write_file(path, "one\ntwo\n")
    assert sandbox.read_file(path) == "one\ntwo\n"
    assert sandbox.read_text(path, 2).text == "two\n"
    assert sandbox.download_file(path) == b"one\ntwo\n"
    assert (sandbox.stat(path).name, sandbox.stat(path).size) == (name, 8)
    assert sandbox.list_dir(WORK) == [f"{folder}/", path]
    assert [info.name for info in sandbox.list_files(folder)] == [name]
    assert sandbox.glob(WORK, "*")[0] == [path]
    assert [(match.path, match.line) for match in sandbox.grep(WORK, "two")[0]] == [(path, "two")]
    assert sandbox.str_replace(path, "one", "1") == 1
    assert sandbox.batch(Batch().read_file(path).read_text(path))[0] == b"1\ntwo\n"
    sandbox.make_link(f"{folder}/link", name)
    assert sandbox.stat(f"{folder}/link", follow=False).target == name
    sandbox.move(path, f"{path}.moved")
    assert not sandbox.exists(path)
    assert not sandbox.exists(f"{folder}/link")
    sandbox.remove(folder, recursive=True)
    assert sandbox.list_dir(WORK) == []


def test_text_is_read_by_its_byte_order_mark_and_binary_is_refused(sandbox: Sandbox) -> None:
    text = "erste\r\nzweite\r\n"
    sandbox.update_file(f"{WORK}/u16", codecs.BOM_UTF16_LE + text.encode("utf-16-le"))
    sandbox.update_file(f"{WORK}/sig", codecs.BOM_UTF8 + text.encode())
    sandbox.update_file(f"{WORK}/bin", b"\x7fELF\0\0")
    sandbox.update_file(f"{WORK}/latin", b"caf\xe9\nx\n")
    for name in ("u16", "sig"):
        assert sandbox.read_file(f"{WORK}/{name}") == text
        assert sandbox.read_file(f"{WORK}/{name}", 2) == "zweite\r\n"
    read = sandbox.read_text(f"{WORK}/u16", max_chars=8)
    assert (read.text, read.end_line, read.total_lines, read.truncated) == ("erste\r\n", 1, 2, True)
    assert sandbox.str_replace(f"{WORK}/u16", "zweite\n", "2\n3\n") == 1
    assert sandbox.download_file(f"{WORK}/u16") == codecs.BOM_UTF16_LE + "erste\r\n2\r\n3\r\n".encode("utf-16-le")
    with pytest.raises(BinaryFile) as refused:
        sandbox.read_text(f"{WORK}/bin")
    assert refused.value.facts["path"] == f"{WORK}/bin"
    with pytest.raises(BinaryFile):
        sandbox.str_replace(f"{WORK}/bin", "ELF", "elf")
    assert sandbox.read_file(f"{WORK}/latin", 1, 1) == "caf\ufffd\n"
    # The digest is the one that guards a write.
    read = sandbox.read_text(f"{WORK}/sig")
    sandbox.write_file(f"{WORK}/sig", "new", if_digest=read.digest)
    with pytest.raises(DigestMismatch):
        sandbox.write_file(f"{WORK}/sig", "newer", if_digest=read.digest)


def tree(top: Path) -> None:
    (top / "deep" / "er").mkdir(parents=True)
    (top / "empty").mkdir()
    (top / "run.sh").write_bytes(b"#!/bin/sh\n")
    (top / "run.sh").chmod(0o750)
    (top / "deep" / "er" / "large").write_bytes(os.urandom(9 * MIB + 1))
    (top / "deep" / "exact").write_bytes(b"x" * 4 * MIB)
    (top / "deep" / "nothing").touch()
    (top / "inside").symlink_to("deep/er/large")
    (top / "deep" / "up").symlink_to("../run.sh")
    (top / "outside").symlink_to("/etc/passwd")
    os.mkfifo(top / "fifo")
    odd = os.fsencode(top) + b"/\xff-\n"
    os.mkdir(odd)
    for number in range(150):
        Path(os.fsdecode(odd), f"n{number}").write_text(str(number))


def looks(top: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink():
            found[str(path.relative_to(top))] = os.readlink(path)
        elif path.is_dir():
            found[str(path.relative_to(top))] = mode
        elif path.is_file():
            found[str(path.relative_to(top))] = (mode, hashlib.sha256(path.read_bytes()).hexdigest())
    return found


def test_a_tree_goes_there_and_back_whole(sandbox: Sandbox, tmp_path: Path) -> None:
    top, back = tmp_path / "tree", tmp_path / "back"
    tree(top)
    steps: list[tuple[int, int | None]] = []
    sent = sandbox.upload(top, f"{WORK}/tree", on_progress=lambda done, total: steps.append((done, total)))
    assert (sent.files, sent.directories, sent.links, sent.bytes) == (154, 5, 3, steps[-1][0])
    assert [line for line in sent.skipped if "fifo" in line] == list(sent.skipped)
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    assert sandbox.run("./tree/run.sh").ok
    got = sandbox.download(f"{WORK}/tree", back)
    assert (got.files, got.links, got.bytes) == (154, 2, sent.bytes)
    assert ["/outside:" in line for line in got.skipped] == [True]
    (top / "outside").unlink()
    assert looks(back) == looks(top)
    # Once more over what is there, and as one who may not write a file it replaces.
    (top / "run.sh").write_bytes(b"changed")
    sandbox.upload(top, "tree")
    sandbox.download("tree", back)
    assert looks(back) == looks(top)


@pytest.mark.slow
def test_a_file_above_the_limit_of_one_operation_goes_there_and_back(sandbox: Sandbox, tmp_path: Path) -> None:
    local, back = tmp_path / "large", tmp_path / "back"
    block = os.urandom(MIB)
    with local.open("wb") as file:
        for number in range(110):
            file.write(number.to_bytes(4, "big") + block)
    local.chmod(0o640)
    sandbox.upload(local, f"{WORK}/deep/large")
    assert sandbox.stat(f"{WORK}/deep/large").mode == 0o640
    assert [info.name for info in sandbox.list_files(f"{WORK}/deep")] == ["large"]
    sandbox.download(f"{WORK}/deep/large", back)
    assert hashlib.sha256(back.read_bytes()).digest() == hashlib.sha256(local.read_bytes()).digest()
    assert sorted(os.listdir(tmp_path)) == ["back", "large"]


def test_a_single_file_keeps_its_mode_and_goes_through_a_link(sandbox: Sandbox, tmp_path: Path) -> None:
    local = tmp_path / "f"
    local.write_bytes(b"x" * (5 * MIB))
    local.chmod(0o440)
    sandbox.write_file(f"{WORK}/real", "old")
    sandbox.make_link(f"{WORK}/link", "real")
    sandbox.upload(local, f"{WORK}/link")
    assert (sandbox.stat(f"{WORK}/real").size, sandbox.stat(f"{WORK}/link", follow=False).type) == (5 * MIB, "symlink")
    assert sandbox.stat(f"{WORK}/real").mode == 0o440
    with pytest.raises(FileNotFoundError):
        sandbox.upload(tmp_path / "none", f"{WORK}/none")
    with pytest.raises(PathNotFound):
        sandbox.download(f"{WORK}/none", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(OSError, match="regular"):
        sandbox.upload("/dev/null", f"{WORK}/null")


def test_an_upload_to_a_thread_never_takes_anothers_name(provider: SandboxProvider, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"y" * (5 * MIB))
    paths = [provider.upload_to_thread("uploads-1", "report.tar.gz", data, user_id="u") for data in (b"1", large, b"2")]
    assert paths == [f"/mnt/user-data/uploads/report.tar{end}.gz" for end in ("", "-1", "-2")]
    sandbox = provider.get(provider.acquire("uploads-1", user_id="u"))
    assert sandbox is not None
    assert sandbox.stat(paths[1]).size == 5 * MIB
    assert sandbox.read_file(paths[2]) == "2"
    assert provider.list_outputs("uploads-1", user_id="u") == []
    sandbox.write_file("/mnt/user-data/outputs/a/b.txt", "done")
    assert [info.path for info in provider.list_outputs("uploads-1", user_id="u")] == ["/mnt/user-data/outputs/a/b.txt"]
    assert provider.get(sandbox.id) is not None, "what this process held before it still holds"
    for name in ("", ".", "..", "a/b", "../x", "a\0", "a\nb", "\\x", "x" * 300):
        with pytest.raises(InvalidArgument):
            provider.upload_to_thread("uploads-1", name, b"", user_id="u")
    provider.destroy(sandbox.id, delete_data=True)


def test_a_stopped_sandbox_keeps_its_files_and_starts_again(provider: SandboxProvider, sandbox: Sandbox) -> None:
    before = sandbox.id
    sandbox.run("echo kept > f; sleep 1000 &")
    sandbox.stop()
    sandbox.stop()  # once more is fine
    with pytest.raises(SandfleetError):
        sandbox.run("true")
    assert before not in [info.sandbox_id for info in provider.list()]
    sandbox.start()
    sandbox.start()
    assert sandbox.id == before
    assert sandbox.read_file("f") == "kept\n"
    assert sandbox.run("pgrep sleep").exit_code == 1
    assert sandbox.health().ok


def test_who_starts_a_sandbox_that_another_stopped_holds_it(
    fleet: Stack, provider: SandboxProvider, sandbox: Sandbox
) -> None:
    """Its own hold was of the sandbox that is gone."""
    with SandboxProvider(fleet.settings) as second:
        info = fleet.store.sandbox(sandbox.id)
        assert info is not None
        other = second.get(second.acquire(info.thread_id, user_id=info.user_id))
        assert other is not None
        sandbox.stop()
        other.start()
        assert second.get(other.id) is not None, "what it started it must hold"
        other.start()
        assert other.run("true").ok
        now = fleet.store.sandbox(sandbox.id)
        assert now is not None
        assert now.epoch > info.epoch
        second.release(other.id)
        assert second.get(other.id) is None, "two starts are one hold"
        wait_until(lambda: (box := fleet.store.sandbox(sandbox.id)) and str(box.state) == "warm", 5)
    sandbox.start()


def test_metrics_tell_what_is_used(sandbox: Sandbox) -> None:
    sandbox.run("head -c 3000000 /dev/zero > zeros; sleep 1000 & python3 -c 'for i in range(3000000): pass'")
    used = sandbox.metrics()
    assert used.cpu_s is not None
    assert used.cpu_s > 0.01
    assert used.memory_bytes is not None
    assert 5 * MIB < used.memory_bytes < 500 * MIB
    assert used.pids is not None
    assert used.pids >= 2
    assert used.disk_bytes is not None
    assert 3_000_000 <= used.disk_bytes < 20_000_000
    assert (used.network_in_bytes, used.network_out_bytes) == (0, 0)
    assert used.uptime_s is not None
    assert wait_until(lambda: sandbox.metrics().cpu_percent is not None, 5)


def test_the_async_twins_do_the_same(fleet: Stack, tmp_path: Path) -> None:
    tree(tmp_path / "tree")

    async def use() -> None:
        async with AsyncSandboxProvider(fleet.settings) as provider:
            path = await provider.upload_to_thread("async-files", "a.bin", tmp_path / "tree" / "run.sh")
            sandbox = provider.get(await provider.acquire("async-files"))
            assert sandbox is not None
            assert (await sandbox.read_text(path)).text == "#!/bin/sh\n"
            await sandbox.upload(tmp_path / "tree", "/mnt/user-data/outputs/tree")
            assert len(await provider.list_outputs("async-files")) == 154
            got = await sandbox.download("/mnt/user-data/outputs/tree", tmp_path / "back")
            assert got.files == 154
            await sandbox.make_link("l", "nowhere")
            assert (await sandbox.stat("l", follow=False)).target == "nowhere"
            with pytest.raises(AlreadyExists):
                await sandbox.make_link("l", "x")
            with pytest.raises(NoMatch):
                await sandbox.str_replace(path, "none", "x")
            assert (await sandbox.metrics()).pids
            await sandbox.stop()
            await sandbox.start()
            assert (await sandbox.read_file(path)).startswith("#!")
            await provider.destroy(sandbox.id, delete_data=True)

    asyncio.run(use())
