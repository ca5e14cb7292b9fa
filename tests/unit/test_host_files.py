"""File operations on virtual paths: what they do like ``os``, and that no path or link leads out."""

from __future__ import annotations

import ast
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet_workers.backends.host_files import Files
from sandfleet_workers.backends.hostd import _PURE, _PURE_PATH, confined_os
from sandfleet_workers.sandboxd import PATH as SANDBOXD

HOME = "/mnt/user-data/workspace"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    for name in ("data/workspace", "data/outputs", "skills", "shared/inner", "outside", "real"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "outside" / "secret").write_text("secret")
    (tmp_path / "skills" / "s").write_text("skill")
    (tmp_path / "raw").symlink_to(tmp_path / "real")
    return tmp_path


@pytest.fixture
def files(host: Path) -> Iterator[Files]:
    made = Files(
        [
            ("/mnt/user-data", [f"{host}/data"], False),
            ("/mnt/skills", [f"{host}/skills"], True),
            ("/mnt/shared", [f"{host}/shared"], False),
            ("/mnt/shared/deep/inner", [f"{host}/shared/inner"], False),
            ("/mnt/linked", [f"{host}/raw", f"{host}/real"], False),
        ],
        {"/workspace": HOME},
    )
    yield made
    made.close()


def read(files: Files, path: str) -> str:
    fd = files.open(path, os.O_RDONLY)
    with open(fd) as file:
        return file.read()


def write(files: Files, path: str, text: str, flags: int = os.O_CREAT | os.O_WRONLY | os.O_TRUNC) -> None:
    fd = files.open(path, flags, 0o666)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The name of the errno a call fails with."""
    with pytest.raises(OSError) as failed:
        call(*args, **options)
    assert failed.value.errno is not None
    return errno.errorcode[failed.value.errno]


def test_it_is_one_tree_under_virtual_names(files: Files, host: Path) -> None:
    write(files, f"{HOME}/f", "1")
    assert (host / "data/workspace/f").read_text() == "1"
    assert read(files, "/workspace/f") == "1"
    assert read(files, "/mnt/user-data//workspace/./f") == "1"
    files.makedirs(f"{HOME}/a/b", exist_ok=True)
    files.makedirs(f"{HOME}/a/b", exist_ok=True)
    assert refusal(files.makedirs, f"{HOME}/a/b") == "EEXIST"
    files.rename(f"{HOME}/f", f"{HOME}/a/g")
    files.symlink("g", f"{HOME}/a/l")
    files.chmod(f"{HOME}/a/g", 0o640)
    files.utime(f"{HOME}/a/g", (5, 7))
    found = files.stat(f"{HOME}/a/l")
    assert (stat.S_IMODE(found.st_mode), found.st_mtime, found.st_size) == (0o640, 7, 1)
    assert stat.S_ISLNK(files.lstat(f"{HOME}/a/l").st_mode)
    assert files.readlink(f"{HOME}/a/l") == "g"
    assert files.realpath("/workspace/a/l") == f"{HOME}/a/g"
    assert files.realpath(f"{HOME}/a/none/x") == f"{HOME}/a/none/x"
    entries = {entry.name: entry for entry in files.scandir(f"{HOME}/a")}
    assert sorted(entries) == ["b", "g", "l"]
    assert (entries["b"].is_dir(), entries["g"].is_file(), entries["l"].is_file(follow_symlinks=False)) == (
        True,
        True,
        False,
    )
    assert entries["l"].is_file()
    assert entries["l"].path == f"{HOME}/a/l"
    assert entries["g"].stat().st_size == 1
    assert files.access(f"{HOME}/a/g", os.W_OK)
    assert files.statvfs(HOME).f_bsize > 0
    files.remove_tree(f"{HOME}/a")
    assert os.listdir(host / "data/workspace") == []


def test_errors_are_the_kernels_and_name_the_virtual_path(files: Files) -> None:
    write(files, f"{HOME}/f", "1")
    assert refusal(files.stat, f"{HOME}/none") == "ENOENT"
    assert refusal(files.stat, f"{HOME}/f/below") == "ENOTDIR"
    assert refusal(files.stat, f"{HOME}/f/") == "ENOTDIR"
    assert refusal(files.open, f"{HOME}/no/parent", os.O_CREAT | os.O_WRONLY) == "ENOENT"
    assert refusal(files.open, HOME, os.O_WRONLY) == "EISDIR"
    assert refusal(files.scandir, f"{HOME}/f") == "ENOTDIR"
    assert refusal(files.rmdir, "/mnt/user-data") == "EBUSY"
    assert refusal(files.rename, "/mnt/shared", f"{HOME}/x") == "EBUSY"
    assert refusal(files.rename, f"{HOME}/f", "/mnt/shared/f") == "EXDEV"
    assert refusal(files.mkdir, "/mnt/user-data") == "EEXIST"
    with pytest.raises(FileNotFoundError) as failed:
        files.unlink(f"{HOME}/none")
    assert failed.value.filename == f"{HOME}/none"
    with pytest.raises(ValueError, match="null byte"):
        files.stat(f"{HOME}/a\0b")


def test_a_slash_at_the_end_means_a_directory(files: Files) -> None:
    write(files, f"{HOME}/f", "1")
    files.symlink("d", f"{HOME}/l")
    files.mkdir(f"{HOME}/d/")
    assert stat.S_ISDIR(files.lstat(f"{HOME}/l/").st_mode)
    assert refusal(files.unlink, f"{HOME}/f/") == "ENOTDIR"
    assert refusal(files.unlink, f"{HOME}/d/") == "EISDIR"
    assert refusal(files.rename, f"{HOME}/f/", f"{HOME}/g") == "ENOTDIR"
    assert refusal(files.rename, f"{HOME}/f", f"{HOME}/g/") == "ENOTDIR"
    assert refusal(files.rmdir, f"{HOME}/l/") == "ENOTDIR"
    files.rename(f"{HOME}/d/", f"{HOME}/e/")
    files.mkdir(f"{HOME}/e/x")
    files.remove_tree(f"{HOME}/e/")
    assert sorted(files.listdir(HOME)) == ["f", "l"]


def test_read_only_roots_are_not_changed(files: Files, host: Path) -> None:
    assert read(files, "/mnt/skills/s") == "skill"
    for call, *args in (
        (files.open, "/mnt/skills/s", os.O_WRONLY),
        (files.open, "/mnt/skills/s", os.O_RDWR),
        (files.open, "/mnt/skills/new", os.O_CREAT | os.O_WRONLY),
        (files.mkdir, "/mnt/skills/d"),
        (files.makedirs, "/mnt/skills/d/e"),
        (files.unlink, "/mnt/skills/s"),
        (files.rmdir, "/mnt/skills"),
        (files.chmod, "/mnt/skills/s", 0o777),
        (files.utime, "/mnt/skills/s"),
        (files.symlink, "x", "/mnt/skills/l"),
        (files.rename, "/mnt/skills/s", "/mnt/skills/t"),
        (files.rename, f"{HOME}/x", "/mnt/skills/t"),
        (files.remove_tree, "/mnt/skills"),
    ):
        if call == files.rename:
            write(files, f"{HOME}/x", "1")
        assert refusal(call, *args) == "EROFS", (call, args)  # type: ignore[arg-type]
    # Nor through a link that may be written.
    files.symlink("/mnt/skills/s", f"{HOME}/l")
    assert refusal(files.open, f"{HOME}/l", os.O_WRONLY) == "EROFS"
    assert os.listdir(host / "skills") == ["s"]


@pytest.mark.parametrize(
    "target",
    ["/etc/passwd", "/", "../..", "../../..", "../../../outside/secret",
     "{host}/outside/secret", "{host}", "{host}/dataset",
     "/mnt", "/mnt/other", "/proc/self/root/etc/passwd", "/mnt/user-data/../outside/secret"],
)  # fmt: skip
def test_a_link_that_leads_out_is_not_followed(files: Files, host: Path, target: str) -> None:
    (host / "dataset").mkdir()
    link = host / "data/workspace/l"
    link.symlink_to(target.format(host=host))
    for call, *args in (
        (files.open, f"{HOME}/l", os.O_RDONLY),
        (files.open, f"{HOME}/l", os.O_WRONLY | os.O_CREAT),
        (files.stat, f"{HOME}/l"),
        (files.stat, f"{HOME}/l/"),
        (files.scandir, f"{HOME}/l"),
        (files.open, f"{HOME}/l/x", os.O_WRONLY | os.O_CREAT),
        (files.stat, f"{HOME}/l/etc/passwd"),
        (files.makedirs, f"{HOME}/l/new"),
        (files.chdir, f"{HOME}/l"),
    ):
        assert refusal(call, *args) in ("EACCES", "ENOENT"), (call, args)  # type: ignore[arg-type]
    assert not files.access(f"{HOME}/l", os.R_OK)
    files.unlink(f"{HOME}/l")  # the link itself is its owner's
    assert (host / "outside" / "secret").read_text() == "secret"


def test_links_between_two_roots_are_followed_by_either_name(files: Files, host: Path) -> None:
    (host / "shared/f").write_text("shared")
    (host / "real/f").write_text("real")
    (host / "shared/inner/f").write_text("inner")
    for target, text in (
        ("/mnt/shared/f", "shared"),
        (f"{host}/shared/f", "shared"),
        ("../../shared/f", "shared"),
        ("../../../mnt/shared/f", "shared"),
        ("../../shared/deep/inner/f", "inner"),
        (f"{host}/raw/f", "real"),
        (f"{host}/real/f", "real"),
        ("/workspace/../outputs/../../skills/s", "skill"),
    ):
        link = host / "data/workspace/l"
        link.symlink_to(target)
        assert read(files, f"{HOME}/l") == text, target
        link.unlink()
    (host / "data/workspace/d").symlink_to("/mnt/shared")
    write(files, f"{HOME}/d/new", "1")
    assert (host / "shared/new").read_text() == "1"
    # Commands meet the host's names, so that is what a link made here says; and it is shown as ours.
    files.symlink("/mnt/shared/f", f"{HOME}/made")
    assert os.readlink(host / "data/workspace/made") == f"{host}/shared/f"
    assert files.readlink(f"{HOME}/made") == "/mnt/shared/f"


def test_links_in_circles_and_chains_end(files: Files, host: Path) -> None:
    work = host / "data/workspace"
    (work / "a").symlink_to("b")
    (work / "b").symlink_to("a")
    (work / "c").symlink_to("c/c/c/c")
    (work / "up").symlink_to("../" * 1300 + "mnt/shared")
    for name in ("a", "c", "c/x"):
        assert refusal(files.stat, f"{HOME}/{name}") == "ELOOP"
    assert files.stat(f"{HOME}/up").st_ino == (host / "shared").stat().st_ino


def test_a_file_with_a_second_name_is_not_written_into(files: Files, host: Path) -> None:
    (host / "data/workspace/h").hardlink_to(host / "outside/secret")
    for flags in (os.O_APPEND | os.O_WRONLY, os.O_TRUNC | os.O_WRONLY):
        assert refusal(files.open, f"{HOME}/h", flags) == "EPERM"
    files.rename(f"{HOME}/h", f"{HOME}/g")
    write(files, f"{HOME}/part", "new")
    files.rename(f"{HOME}/part", f"{HOME}/g")  # how a write replaces a file
    assert (host / "outside/secret").read_text() == "secret"


def test_a_tree_is_removed_without_following_its_links(files: Files, host: Path) -> None:
    tree = host / "data/workspace/t"
    (tree / "d" / "e").mkdir(parents=True)
    (tree / "d" / "out").symlink_to(host / "outside")
    (tree / "d" / "e" / "up").symlink_to("..")
    files.remove_tree(f"{HOME}/t")
    assert not tree.exists()
    assert (host / "outside/secret").exists()


def test_a_directory_that_another_root_lies_in_is_not_removed(host: Path) -> None:
    (host / "data/d/inner").mkdir(parents=True)
    (host / "data/d/inner/hidden").write_text("")
    files = Files([("/mnt/data", [f"{host}/data"], False), ("/mnt/data/d/inner", [f"{host}/outside"], False)], {})
    assert refusal(files.remove_tree, "/mnt/data/d") == "EBUSY"
    files.close()
    assert (host / "data/d/inner/hidden").exists()


def test_directories_as_deep_as_a_path_may_be_are_made_and_removed_in_a_moment(files: Files, host: Path) -> None:
    deep = f"{HOME}/" + "/".join(["d"] * 1900)
    began = time.monotonic()
    files.makedirs(deep)
    assert files.is_kind(deep, stat.S_ISDIR)
    assert refusal(files.makedirs, deep) == "EEXIST"
    files.remove_tree(f"{HOME}/d")
    assert os.listdir(host / "data/workspace") == []
    assert time.monotonic() - began < 10


def test_a_link_on_the_way_of_directories_to_make_is_not_followed_out(files: Files, host: Path) -> None:
    work = host / "data/workspace"
    for name, target in (("out", "/etc"), ("nowhere", "none"), ("ok", "../outputs")):
        (work / name).symlink_to(target)
    assert refusal(files.makedirs, f"{HOME}/out/a/b") == "EACCES"
    assert refusal(files.makedirs, f"{HOME}/nowhere/a/b") == "ENOENT"
    files.makedirs(f"{HOME}/./ok//a/b/", exist_ok=True)
    assert (host / "data/outputs/a/b").is_dir()


def test_no_descriptor_is_left(files: Files, host: Path) -> None:
    (host / "data/workspace/out").symlink_to("/etc")
    (host / "data/workspace/a/b/c").mkdir(parents=True)
    (host / "data/workspace/in").symlink_to("/mnt/shared/inner/../../user-data/workspace/a/b")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        files.scandir(f"{HOME}/a/b")
        files.stat(f"{HOME}/in/c")
        files.realpath(f"{HOME}/in/none/none")
        for path in ("out/x", "none/x", "a/b/none/x"):
            refusal(files.stat, f"{HOME}/{path}")
    assert len(os.listdir("/proc/self/fd")) == before


@settings(max_examples=300, deadline=None)
@given(
    targets=st.lists(
        st.lists(st.sampled_from(["..", ".", "", "l0", "l1", "l2", "d", "f", "outputs", "mnt", "etc", "outside"]),
                 min_size=1, max_size=6),
        min_size=3, max_size=3),
    absolute=st.lists(st.sampled_from(["", "/", "/mnt/user-data/", "{host}/", "{host}/data/"]), min_size=3, max_size=3),
    path=st.lists(st.sampled_from(["..", "l0", "l1", "l2", "d", "f", ""]), min_size=1, max_size=5),
)  # fmt: skip
def test_whatever_links_there_are_nothing_outside_is_ever_opened(
    tmp_path_factory: pytest.TempPathFactory, targets: list[list[str]], absolute: list[str], path: list[str]
) -> None:
    host = tmp_path_factory.mktemp("h")
    work = host / "data/workspace"
    (work / "d").mkdir(parents=True)
    (host / "data/outputs").mkdir()
    (work / "d/f").write_text("in")
    for number, (parts, start) in enumerate(zip(targets, absolute, strict=True)):
        os.symlink((start.format(host=host) + "/".join(parts)) or ".", work / f"l{number}")
    files = Files([("/mnt/user-data", [f"{host}/data"], False)], {})
    why, opened = 0, f"{host}/data/"
    try:
        fd = files.open("/".join([HOME, *path]), os.O_RDONLY)
        opened = os.readlink(f"/proc/self/fd/{fd}") + "/"
        os.close(fd)
    except OSError as exc:
        why = exc.errno or -1
    finally:
        files.close()
    assert opened.startswith(f"{host}/data/")
    assert why in {0, errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


# --- the module that sandboxd gets for os ----------------------------------------------------


def test_what_was_not_taught_refuses_virtual_paths_and_serves_others(files: Files, tmp_path: Path) -> None:
    confined = confined_os(files)
    for name in ("truncate", "link", "mkfifo", "removedirs", "walk", "getxattr", "chown"):
        assert refusal(getattr(confined, name), f"{HOME}/x", 1) == "EACCES", name
    assert refusal(confined.path.samefile, HOME, HOME) == "EACCES"
    confined.truncate(_made(tmp_path / "f"), 0)
    assert confined.listdir("/proc/self/fd")
    assert confined.path.join(HOME, "x") == f"{HOME}/x"
    assert confined.fsencode(HOME) == HOME.encode()
    assert confined.path.isdir(HOME)
    assert not confined.path.exists(f"{HOME}/x")
    assert confined.path.exists("/proc/self")
    assert confined.DirEntry is os.DirEntry
    assert confined.O_RDONLY == 0


def test_data_that_looks_like_a_path_is_data(files: Files) -> None:
    confined = confined_os(files)
    fd = confined.open(f"{HOME}/f", os.O_CREAT | os.O_WRONLY, 0o600)
    assert confined.write(fd, f"{HOME}/x".encode()) == len(f"{HOME}/x")
    confined.close(fd)
    assert read(files, f"{HOME}/f") == f"{HOME}/x"


def test_a_helper_that_closes_everything_keeps_the_roots(files: Files) -> None:
    confined, pid = confined_os(files), os.fork()
    if pid == 0:
        try:
            confined.closerange(4, 4096)
            os._exit(0 if stat.S_ISDIR(files.stat(HOME).st_mode) and len(os.listdir("/proc/self/fd")) < 12 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _made(path: Path) -> str:
    path.write_text("x")
    return str(path)


def test_every_function_of_os_that_sandboxd_uses_is_taught_or_known_to_touch_no_path_of_the_sandbox(
    files: Files,
) -> None:
    """Fails when sandboxd begins to use another one: teach it to `Files`, or say here why it need not be."""
    used, used_of_path = set[str](), set[str]()
    for node in ast.walk(ast.parse(SANDBOXD.read_text())):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) == "os":
                used.add(node.attr)
            elif ast.unparse(node.value) == "os.path":
                used_of_path.add(node.attr)
    confined: Any = confined_os(files)
    taught = {*confined._taught, "chdir", "closerange", "path", *_PURE}
    by_descriptor = {"close", "dup2", "fchmod", "fstat", "ftruncate", "lseek", "memfd_create", "pipe2", "pread", "read",
                     "sendfile", "set_blocking", "write"}  # fmt: skip
    process = {"_exit", "environ", "fork", "getcwd", "getpid", "getuid", "kill", "killpg", "sysconf", "umask",
               "urandom", "waitpid", "uname", "defpath", "stat_result", "DirEntry"}  # fmt: skip
    # The backend offers no terminals, and these stay refused.
    terminals = {"dup", "openpty", "ttyname"}
    constants = {name for name in used if name.isupper()}
    assert used - taught - by_descriptor - process - terminals - constants == set()
    # abspath: of the socket, before anything is confined.
    assert used_of_path - set(confined.path._taught) - _PURE_PATH - {"abspath"} == set()
