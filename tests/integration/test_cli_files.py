"""``sandfleet cp`` against a real fleet: files and trees both ways, the rules of cp, and hostile sandboxes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandfleet import SandboxProvider
from sandfleet.cli import main
from sandfleet.stack import Stack
from tests.services import wait_until

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

Run = Callable[..., tuple[int, str, str]]
SANDFLEET = (sys.executable, "-c", "import sys; from sandfleet.cli import main; sys.exit(main())")
WORKSPACE = "/mnt/user-data/workspace"


@pytest.fixture
def run(fleet: Stack, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command against the fleet, in an empty directory: its exit code, stdout and stderr."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["--redis-url", fleet.settings.redis_url, *words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def shell(run: Run, thread: str, line: str) -> str:
    code, out, err = run("exec", "-n", "-t", thread, "--", line)
    assert code == 0, err
    return out


def tree(top: Path) -> dict[str, bytes | str | None]:
    """Everything below a directory: contents of files, targets of links, None for directories."""
    return {
        str(path.relative_to(top)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(top.rglob("*"))
    }


def test_a_file_goes_in_and_comes_out_as_it_was(run: Run) -> None:
    data = bytes(range(256)) * 5000
    Path("data.bin").write_bytes(data)
    Path("data.bin").chmod(0o750)
    assert run("cp", "data.bin", "cp-1:sub/copy.bin") == (0, "", "")
    assert shell(run, "cp-1", "stat -c '%a %s' sub/copy.bin") == f"750 {len(data)}\n"
    assert run("cp", f"cp-1:{WORKSPACE}/sub/copy.bin", "back.bin") == (0, "", "")
    assert Path("back.bin").read_bytes() == data
    assert Path("back.bin").stat().st_mode & 0o777 == 0o750


def test_a_tree_goes_in_and_comes_out_as_it_was(run: Run) -> None:
    names = ["a.txt", "deep/er/b.txt", "-leading", "new\nline", "ünï", "sp ace"]
    for name in names:
        Path("src", name).parent.mkdir(parents=True, exist_ok=True)
        Path("src", name).write_text(name)
    Path("src/empty").mkdir()
    Path("src/link").symlink_to("deep/er")
    assert run("cp", "src", "cp-tree:copy") == (0, "", "")
    assert shell(run, "cp-tree", "find copy -type f | wc -l; readlink copy/link") == f"{len(names) + 1}\ndeep/er\n"
    assert run("cp", "cp-tree:copy", "back") == (0, "", "")
    assert tree(Path("back")) == tree(Path("src"))


def test_the_rules_of_cp_hold_in_the_sandbox(run: Run) -> None:
    Path("src").mkdir()
    Path("src/a").write_text("a")
    shell(run, "cp-rules", "mkdir -p there; echo old > file")
    for source, target in (("src", "there"), ("src/a", "there/"), ("src/.", "there/merged"), ("src/a", "new")):
        assert run("cp", source, f"cp-rules:{target}") == (0, "", "")
    assert (
        shell(run, "cp-rules", "find . -type f | sort") == "./file\n./new\n./there/a\n./there/merged/a\n./there/src/a\n"
    )
    for source, target in (("src", "file"), ("src/a", "missing/"), ("src/a", "file/"), ("missing", "x")):
        code, out, err = run("cp", source, f"cp-rules:{target}")
        assert (code, out) == (4, "")
        assert f"cannot copy {source} to cp-rules:{target}: " in err
    assert shell(run, "cp-rules", "cat file; ls") == "old\nfile\nnew\nthere\n"


def test_the_rules_of_cp_hold_here(run: Run) -> None:
    shell(run, "cp-out", "mkdir -p d; echo 1 > d/f")
    Path("there").mkdir()
    Path("file").write_text("old")
    for source, target in (("d", "there"), ("d/f", "there/"), ("d/.", "fresh"), ("d/f", "one")):
        assert run("cp", f"cp-out:{source}", target) == (0, "", "")
    assert [name for name, data in tree(Path()).items() if data is not None] == [
        "file", "fresh/f", "one", "there/d/f", "there/f",
    ]  # fmt: skip
    for source, target in (("d", "file"), ("d/f", "missing/"), ("nope", "x")):
        code, _, err = run("cp", f"cp-out:{source}", target)
        assert code == 4
        assert f"cannot copy cp-out:{source} to {target}: " in err
    assert Path("file").read_text() == "old"


def test_a_local_directory_that_cannot_be_written_is_named(run: Run) -> None:
    shell(run, "cp-out", "mkdir -p d; echo 1 > d/f")
    Path("file").write_text("in the way")
    code, _, err = run("cp", "cp-out:d/f", "file/sub")
    assert code == 4
    assert "cannot copy cp-out:d/f to file/sub: " in err
    assert "Traceback" not in err


def test_standard_streams_are_an_end_too(fleet: Stack) -> None:
    cp = [*SANDFLEET, "--redis-url", fleet.settings.redis_url, "cp"]
    data = bytes(range(256)) * 40_000  # more than one piece
    subprocess.run([*cp, "-", "cp-pipe:data.bin"], input=data, check=True, timeout=50)
    back = subprocess.run([*cp, "cp-pipe:data.bin", "-"], capture_output=True, check=True, timeout=50)
    assert back.stdout == data
    for words in (["-", "cp-pipe:"], ["cp-pipe:.", "-"]):
        refused = subprocess.run([*cp, *words], input=b"x", capture_output=True, check=False, timeout=50)
        assert refused.returncode == 4
        assert b"cannot copy" in refused.stderr


def test_a_copy_told_as_json_is_one_document(run: Run) -> None:
    Path("src").mkdir()
    Path("src/a").write_text("12345")
    code, out, err = run("cp", "--json", "--user", "u1", "src", "cp-json:")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert (told["path"], told["files"], told["directories"], told["bytes"]) == (f"{WORKSPACE}/src", 1, 1, 5)
    assert (told["source"], told["target"], told["skipped"]) == ("src", "cp-json:", [])
    code, out, _ = run("cp", "--json", "missing", "cp-json:")
    assert (code, json.loads(out)["error"]["code"]) == (4, "path_not_found")


def test_a_sandbox_cannot_make_a_copy_write_outside_its_destination(run: Run, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    line = (
        f"mkdir -p evil/sub && cd evil && ln -s {outside} out && ln -s / root && ln -s ../../../../../..{outside} up "
        f"&& ln -s sub fine && echo x > sub/f && mkfifo pipe && touch -- '-rf' 'a\\nb'"
    )
    shell(run, "cp-evil", line)
    code, _, err = run("cp", "cp-evil:evil", "got")
    assert code == 1, "what was left away makes the copy incomplete, and that must be seen"
    assert "left away" in err
    got = tree(Path("got"))
    assert got["fine"] == "sub"
    assert got["sub/f"] == b"x\n"
    assert not {"out", "root", "up", "pipe"} & set(got)
    # Again, over what is there now: a local link must not be walked through either.
    Path("got/sub/f").unlink()
    Path("got/sub").rmdir()
    Path("got/sub").symlink_to(outside)
    run("cp", "cp-evil:evil/.", "got")
    assert list(outside.iterdir()) == []


def test_uploads_take_links_as_links(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not to be copied")
    Path("src").mkdir()
    Path("src/leads-out").symlink_to(tmp_path / "secret")
    assert run("cp", "src", "cp-links:")[0] == 0
    assert shell(run, "cp-links", "readlink src/leads-out; test -e src/leads-out || echo dangling").endswith(
        "dangling\n"
    )


def test_the_copy_releases_its_sandbox(run: Run, fleet: Stack) -> None:
    Path("a").write_text("a")
    assert run("cp", "a", "cp-held:")[0] == 0
    assert run("cp", "missing", "cp-held:")[0] == 4
    [info] = fleet.store.sandboxes(thread_id="cp-held")
    assert (info.state, info.agents) == ("warm", 0)


def test_a_terminal_sees_progress_and_a_pipe_does_not(fleet: Stack, provider: SandboxProvider, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(6 * 1024 * 1024))
    cp = [*SANDFLEET, "--redis-url", fleet.settings.redis_url, "cp", str(tmp_path / "big"), "cp-bar:"]
    main_fd, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    child = subprocess.Popen(cp, stderr=terminal, env=env)
    os.close(terminal)
    shown = bytearray()

    def ended() -> bool:
        try:
            shown.extend(os.read(main_fd, 65536))
        except OSError:
            return True
        return False

    wait_until(ended, 40)
    os.close(main_fd)
    assert child.wait(10) == 0
    assert b"MB" in shown
    assert shown.rstrip(b"\r\n ").endswith((b"\x1b[2K", b"\x1b[?25h")), "the bar is wiped away and the cursor is back"
    quiet = subprocess.run([*cp, "-q"], capture_output=True, check=False, timeout=40)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, b"", b"")
