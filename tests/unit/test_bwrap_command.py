"""The command line that makes a local sandbox, as plain text."""

from __future__ import annotations

import errno
import struct

import pytest

from sandfleet_workers.backends.bwrap import Bind, Layout, bwrap_argv, etc_files, limited, staged
from sandfleet_workers.backends.local_dirs import sandbox_uid
from sandfleet_workers.backends.seccomp import filter_program

LAYOUT = Layout(
    bwrap="/bin/bwrap",
    command=("python3", "sandboxd"),
    root_links={"/bin": "usr/bin"},
    binds=(Bind("/data/run", "/.sandfleet/run", read_only=False), Bind(7, "/mnt/skills")),
    files={"/etc/passwd": 9},
    env={"PATH": "/usr/bin"},
    info_fd=11,
    seccomp_fd=12,
)


def has(argv: list[str], *words: str) -> bool:
    """Whether the words follow each other in the command line."""
    return any(tuple(argv[i : i + len(words)]) == words for i in range(len(argv)))


def test_every_wall_is_up() -> None:
    argv = bwrap_argv(LAYOUT)
    assert argv[0] == "/bin/bwrap"
    for wall in ("--unshare-all", "--as-pid-1", "--new-session", "--die-with-parent", "--clearenv", "--disable-userns"):
        assert wall in argv
    assert has(argv, "--cap-drop", "ALL")
    assert has(argv, "--seccomp", "12")
    assert argv[-3:] == ["--", "python3", "sandboxd"]
    assert not {"--share-net", "--cap-add", "--dev-bind"} & set(argv)


def test_only_what_is_told_writable_is_writable() -> None:
    argv = bwrap_argv(LAYOUT)
    assert [argv[i + 2] for i, word in enumerate(argv) if word in {"--bind", "--bind-fd"}] == ["/.sandfleet/run"]
    assert has(argv, "--ro-bind", "/usr", "/usr")
    assert has(argv, "--ro-bind-fd", "7", "/mnt/skills")
    assert has(argv, "--symlink", "usr/bin", "/bin")
    assert has(argv, "--ro-bind-data", "9", "/etc/passwd")


def test_the_root_is_sealed_after_the_last_mount() -> None:
    argv = bwrap_argv(LAYOUT)
    sealed = argv.index("--remount-ro")
    assert not {"--bind", "--ro-bind", "--ro-bind-fd", "--tmpfs", "--symlink"} & set(argv[sealed:])


def test_memory_file_systems_are_bounded() -> None:
    argv = bwrap_argv(LAYOUT)
    for place in ("/tmp", "/run", "/dev/shm"):
        at = argv.index(place, argv.index("--tmpfs"))
        assert "--size" in argv[at - 5 : at], place


def test_an_old_bwrap_is_not_asked_for_what_it_lacks() -> None:
    assert "--disable-userns" not in bwrap_argv(
        Layout(bwrap="b", command=("c",), nested_userns=True, info_fd=None, seccomp_fd=None)
    )


def test_limits_come_before_the_program() -> None:
    argv = limited(["prog", "a b"], nofile=4096, nproc=256, file_bytes=1024)
    assert argv[:2] == ["/bin/sh", "-c"]
    assert argv[3:] == ["sh", "prog", "a b"]
    for rule in ("ulimit -c 0", "ulimit -n 4096", "256", "ulimit -f 2"):
        assert rule in argv[2]
    assert "-u" not in limited(["prog"], nofile=1, nproc=None, file_bytes=None)[2]


def test_a_staged_path_is_quoted() -> None:
    argv = staged(["prog"], stage="/tmp/s", sources={"0": ("/private/a b; rm -rf /", True), "1": ("/f", False)}, uid=7)
    script = argv[argv.index("-c") + 1]
    assert "'/private/a b; rm -rf /' /tmp/s/0" in script
    assert "mkdir /tmp/s/1" not in script
    assert script.splitlines()[-1].startswith("exec setpriv --reuid 7 --regid 7 --clear-groups")


def test_the_users_of_the_sandbox_are_made_up() -> None:
    files = etc_files(1234, 1234)
    assert "sandbox:x:1234:1234:" in files["/etc/passwd"]
    assert len(files["/etc/passwd"].splitlines()) == 2


def test_a_uid_is_stable_and_in_its_range() -> None:
    digests = [f"{n:064x}" for n in range(0, 2**60, 2**55)]
    uids = [sandbox_uid(digest, 1000, 50) for digest in digests]
    assert all(1000 <= uid < 1050 for uid in uids)
    assert uids == [sandbox_uid(digest, 1000, 50) for digest in digests]


def verdict(program: bytes, arch: int, number: int, second: int = 0, first: int = 0) -> int:
    """What the filter returns for a system call: the few instructions it uses, interpreted."""
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    while True:
        op, jump_true, jump_false, value = code[at]
        at += 1
        if op == 0x20:
            accumulator = {0: number, 4: arch, 16: first, 24: second}[value]
        elif op == 0x15:
            at += jump_true if accumulator == value else jump_false
        elif op == 0x35:
            at += jump_true if accumulator >= value else jump_false
        else:
            assert op == 0x06
            return int(value)


@pytest.mark.parametrize(
    ("machine", "arch", "denied", "allowed"),
    [
        ("x86_64", 0xC000003E, (425, 321, 165, 272, 323), (0, 1, 56, 59, 435)),
        ("aarch64", 0xC00000B7, (425, 280, 40, 97), (63, 64, 220, 221)),
    ],
)
def test_the_filter_refuses_what_it_lists_and_nothing_else(
    machine: str, arch: int, denied: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    program = filter_program(machine)
    assert program is not None
    assert {verdict(program, arch, number) for number in denied} == {0x00050000 | errno.EPERM}
    assert {verdict(program, arch, number) for number in allowed} == {0x7FFF0000}
    assert verdict(program, 0x40000003, 1) == 0x80000000
    assert verdict(program, arch, 0x40000000 + 1) != 0x7FFF0000


@pytest.mark.parametrize(("machine", "arch", "ioctl"), [("x86_64", 0xC000003E, 16), ("aarch64", 0xC00000B7, 29)])
def test_no_file_leaves_its_project(machine: str, arch: int, ioctl: int) -> None:
    program = filter_program(machine)
    assert program is not None
    refused, allowed = 0x00050000 | errno.EPERM, 0x7FFF0000
    assert [verdict(program, arch, ioctl, request) for request in (0x401C5820, 0x40086602)] == [refused, refused]
    assert [verdict(program, arch, ioctl, request) for request in (0, 0x5401, 0x801C581F)] == [allowed] * 3
    assert verdict(program, arch, ioctl + 1, 0x401C5820) == allowed


@pytest.mark.parametrize(("machine", "arch", "prlimit"), [("x86_64", 0xC000003E, 302), ("aarch64", 0xC00000B7, 261)])
def test_limits_are_set_by_a_process_for_itself(machine: str, arch: int, prlimit: int) -> None:
    program = filter_program(machine)
    assert program is not None
    assert verdict(program, arch, prlimit, first=0) == 0x7FFF0000
    assert verdict(program, arch, prlimit, first=1) == 0x00050000 | errno.EPERM


def test_an_unknown_machine_has_no_filter() -> None:
    assert filter_program("riscv64") is None
