"""Escape and privilege: the cases E of the catalogue. SECURITY.md says what each is about."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet.backends import Liveness
from sandfleet.errors import NotStarted, SandboxLost
from tests.security.boxes import WORKSPACE, Box, Boxes, as_root, docker, inspected, opened
from tests.services import SANDBOX_IMAGE, require, wait_until

EMPTY = "0" * 16


def fields_of(status: str) -> dict[str, str]:
    """The lines of a process' ``/proc/<pid>/status``."""
    return dict(re.findall(r"^(\w+):[ \t]*(.*)$", status, re.MULTILINE))


def status_of(box: Box, pid: str) -> dict[str, str]:
    """The kernel's word on a process of the sandbox, asked inside."""
    return fields_of(box.run(f"cat /proc/{pid}/status"))


# --- what it has ---------------------------------------------------------------------------------


def test_E1_no_socket_of_an_engine_is_in_reach(box: Box) -> None:
    known = "/var/run/docker.sock /run/docker.sock /run/containerd/*.sock /run/podman/*.sock /run/crio/*.sock"
    assert box.run(f"ls {known} 2>/dev/null") == ""
    assert box.run("find / -type s 2>/dev/null").split() == ["/.sandfleet/run/s"], "its own, and no other"
    assert not [line for line in box.run("cat /proc/self/mountinfo").splitlines() if ".sock" in line]


def test_E1_not_by_a_name_without_a_file_either(box: Box) -> None:
    """Abstract sockets belong to a network namespace (containerd's shims once listened at such)."""
    name = f"sandfleet-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        seen = box.python("import socket, sys; socket.socket(socket.AF_UNIX).connect(chr(0) + sys.argv[1])", name)
        assert "Connection refused" in seen
        assert name not in box.run("cat /proc/net/unix")


def test_E2_no_process_has_a_capability(box: Box) -> None:
    box.value("execute_command", command="true", session="caps")
    shell = box.value("execute_command", command="grep Cap /proc/$$/status", session="caps")["stdout"]
    assert re.findall(r"Cap\w+:\s+(\w+)", shell) == [EMPTY] * 5
    for pid in ("self", "1"):
        status = status_of(box, pid)
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {EMPTY}, pid


def test_E3_it_gains_no_privileges_and_system_calls_are_filtered(box: Box) -> None:
    for pid in ("self", "1"):
        status = status_of(box, pid)
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), pid
    for attempt in (
        "unshare -Ur true", "mount -t tmpfs none /mnt", "umount /proc", "dmesg", "mknod d c 1 3", "chown 0 .",
        "chroot / true", "nsenter -t 1 -m true", "hostname other", "date -s 2000-01-01", "renice -n -5 $$",
    ):  # fmt: skip
        assert "done" not in box.run(f"{attempt} 2>&1 && echo done"), attempt


@as_root
def test_E3_a_setuid_program_runs_as_who_started_it(box: Box) -> None:
    assert box.run("cp /usr/bin/id roots") == ""
    program = box.workspace / "roots"
    os.chown(program, 0, 0)
    program.chmod(0o6755)
    assert box.run("stat -c '%A %u' roots").split()[0] == "-rwsr-sr-x", "the host made it setuid"
    assert box.run("./roots -u; ./roots -g").split() == [box.run("id -u").strip(), box.run("id -g").strip()]
    program.unlink()


@as_root
def test_E4_it_is_nobody_inside_and_outside(box: Box) -> None:
    uid = int(box.run("id -u"))
    assert uid >= 10001
    assert box.run("id -G").split() == [str(uid)]
    outside = fields_of(Path(f"/proc/{box.pid}/status").read_text())
    assert set(outside["Uid"].split()) == set(outside["Gid"].split())
    assert int(outside["Uid"].split()[0]) >= 10001
    assert set(outside["Groups"].split()) <= {outside["Gid"].split()[0]}


#: Each by its number, and what it is called with; then how that ended, one line each.
CALLS = """
import ctypes, errno, json, sys
c = ctypes.CDLL(None, use_errno=True)
for name, number, *args in json.loads(sys.argv[1]):
    ctypes.set_errno(0)
    room = ctypes.create_string_buffer(256)
    done = c.syscall(number, *(room if each == "room" else each for each in args))
    print(name, "done" if done >= 0 else errno.errorcode[ctypes.get_errno()])
"""
X86_64 = [
    ["unshare", 272, 0x10000000], ["setns", 308, 0, 0], ["bpf", 321, 0, 0, 0], ["keyctl", 250, 0, -3, 1],
    ["add_key", 248, "room", "room", "room", 1, -3], ["request_key", 249, "room", "room", "room", -3],
    ["perf_event_open", 298, "room", 0, -1, -1, 0], ["userfaultfd", 323, 0], ["fsopen", 430, "room", 0],
    ["mount", 165, "room", "room", "room", 0, 0], ["pivot_root", 155, "room", "room"], ["init_module", 175, 0, 0, 0],
    ["open_by_handle_at", 304, 0, 0, 0], ["kexec_load", 246, 0, 0, 0, 0], ["reboot", 169, 0, 0, 0, 0],
    ["io_uring_setup", 425, 8, "room"],
]  # fmt: skip


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86_64")
def test_E5_system_calls_that_exploits_begin_with_are_refused(box: Box) -> None:
    told = box.python(CALLS, json.dumps(X86_64)).splitlines()
    assert len(told) == len(X86_64), told
    assert not [line for line in told if line.split()[1] not in {"EPERM", "ENOSYS"}], told


def test_E6_the_kernels_own_files_cannot_be_written(box: Box) -> None:
    places = [
        "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sys/kernel/hostname",
        "/proc/sysrq-trigger", "/proc/kcore", "/proc/1/root/x", "/proc/1/oom_score_adj", "/proc/kmsg",
        "/proc/acpi/x", "/proc/bus/x", "/sys/kernel/uevent_helper", "/sys/fs/cgroup/release_agent",
        "/sys/fs/cgroup/memory/release_agent", "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs",
        "/sys/fs/cgroup/pids/pids.max", "/sys/fs/cgroup/pids.max", "/sys/power/state",
    ]  # fmt: skip
    for place in places:
        assert "done" not in box.run(f"(echo 1 > {place}) 2>/dev/null && echo done"), place
    for place in ("/proc/kcore", "/proc/kmsg", "/proc/keys", "/proc/1/root/etc/passwd", "/sys/firmware/x"):
        assert box.run(f"head -c 1 {place} 2>/dev/null") == "", place


# --- where commands start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cwd",
    [
        *(f"/proc/self/fd/{number}" for number in (3, 7, 8, 9, 10)), "/proc/1/cwd", "/proc/1/root", "/proc/self/cwd",
        "/proc/self/root/proc", "/proc", "/sys", "/dev", "/dev/fd/7", "/mnt/../proc/self/fd", "../../../proc/1/cwd",
    ],
)  # fmt: skip
def test_E7_no_command_starts_at_a_descriptor_or_another_process_directory(box: Box, cwd: str) -> None:
    assert box.code("execute_command", command="pwd", cwd=cwd) in {
        "invalid_argument", "path_not_found", "not_directory", "permission_denied",
    }  # fmt: skip
    assert box.code("execute_command", command="pwd", cwd=cwd, session="elsewhere") in {
        "invalid_argument", "path_not_found", "not_directory", "permission_denied",
    }  # fmt: skip


def test_E7_a_link_to_such_a_place_leads_nowhere_new(box: Box) -> None:
    box.run("ln -sfn /proc/self/fd fds; ln -sfn /proc/1/root away")
    assert box.code("execute_command", command="pwd", cwd="fds") == "invalid_argument"
    completion = box.do("execute_command", command="stat -c %d:%i . /", cwd="away")
    if completion.error is None:  # it may be followed: to the sandbox's own root
        assert len(set(completion.value["stdout"].split())) == 1
    box.run("rm fds away")


@pytest.fixture
def odd_image() -> Iterator[str]:
    """The sandbox image with a working directory and a start of its own."""
    require("docker")
    name = f"sandfleet/test-odd:{uuid.uuid4().hex[:12]}"
    made = docker("create", SANDBOX_IMAGE, "true")
    changes = ("WORKDIR /proc/self/fd/8", "USER 0", 'ENTRYPOINT ["/bin/evil"]')
    try:
        docker("commit", *(word for change in changes for word in ("--change", change)), made, name)
    finally:
        docker("rm", made)
    yield name
    docker("rmi", "--no-prune", name)


@pytest.mark.docker
def test_E7_an_images_own_working_directory_user_and_start_do_not_count(odd_image: str, tmp_path: Path) -> None:
    with opened("docker", tmp_path, container={"image": odd_image}) as boxes, boxes.one() as box:
        config = inspected(box)["Config"]
        assert (config["WorkingDir"], config["User"]) == ("/", "10001:10001")
        assert box.run("pwd; id -u").split() == [WORKSPACE, "10001"]
        assert box.run("readlink /proc/self/cwd").strip() == WORKSPACE


# --- what it can do to those that serve it -------------------------------------------------------

TROJAN = "#!/bin/sh\necho $0 >> /tmp/ran\nexit 0\n"


def test_E9_what_the_agent_plants_runs_for_the_agent_alone(box: Box) -> None:
    """Files of a shell's start, programs of the system's names, libraries, Python's own hooks."""
    box.run("mkdir -p bin .local/lib; rm -f /tmp/ran")
    for name in ("sh", "bash", "rg", "grep", "python3", "ls", "cat", "find", "env"):
        box.value("write_file", TROJAN.encode(), path=f"bin/{name}", mode=0o755)
        box.value("write_file", TROJAN.encode(), path=name, mode=0o755)
    hook = "import os; open('/tmp/ran', 'a').write('python\\n')\n"
    for name in ("sitecustomize.py", "usercustomize.py", "os.py", "json.py", "socket.py"):
        box.value("write_file", hook.encode(), path=name)
    for name in (".profile", ".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".env", ".inputrc"):
        box.value("write_file", b"echo $0 rc >> /tmp/ran\nexport PATH=/tmp\n", path=name)
    box.value("write_file", b"not a library", path="evil.so")
    evil = {"LD_PRELOAD": f"{WORKSPACE}/evil.so", "PATH": f"{WORKSPACE}/bin", "BASH_ENV": f"{WORKSPACE}/.bashrc",
            "ENV": f"{WORKSPACE}/.env", "PYTHONPATH": WORKSPACE, "PYTHONSTARTUP": f"{WORKSPACE}/os.py"}  # fmt: skip
    try:
        box.result("ls; cat x; echo planted", env=evil)
        box.result("export " + " ".join(f"{name}={value}" for name, value in evil.items()), session="planted")
        box.run("rm -f /tmp/ran")
        _the_node_works(box)
        assert box.code("stat", path="/tmp/ran") == "path_not_found", "nothing that was planted ran"
        # The next command has its environment of before, too.
        assert "LD_PRELOAD" not in box.run("env")
        assert box.run("command -v ls; echo $PATH").splitlines()[0] in {"/usr/bin/ls", "/bin/ls"}
        assert box.code("stat", path="/tmp/ran") == "path_not_found"
    finally:
        box.do("close_session", session="planted")
        box.result(argv=["/bin/sh", "-c", "rm -rf /mnt/user-data/workspace/* /mnt/user-data/workspace/.[a-z]*"])


def _the_node_works(box: Box) -> None:
    """All that a node does in a sandbox by itself."""
    box.value("write_file", b"needle\n", path="hay/stack.txt")
    assert box.read("hay/stack.txt") == b"needle\n"
    assert box.value("list_dir", path="hay")["entries"]
    assert box.value("glob", path=".", pattern="**/*.txt")["paths"]
    assert box.value("grep", path=".", pattern="need.e")["matches"]
    box.value("str_replace", path="hay/stack.txt", old="needle", new="pin")
    box.value("metrics")
    assert box.value("health")["status"] == "alive"
    assert box.run("echo $((6 * 7))") == "42\n"


def test_E9_nothing_of_ours_can_be_replaced(box: Box) -> None:
    places = ["/.sandfleet", "/.sandfleet/sandboxd.pyc", "/usr/bin", "/usr/bin/python3", "/etc/profile"]
    places.append("/etc/ld.so.preload")
    if box.boxes.backend.name == "docker":  # where the socket of a local sandbox lies can be written: E10, F8
        places.append("/.sandfleet/run")
    attempts = 'for do in (lambda: open(p, "a"), lambda: os.rename(p, p + ".old"), lambda: os.mkdir(p + "/x")):'
    script = f"import os, sys\np = sys.argv[1]\n{attempts}\n try: do()\n except OSError: pass\n else: print(p)"
    for place in places:
        assert box.python(script, place) == ""
    assert box.value("health")["status"] == "alive"


#: Reads a byte of process 1's memory and says what that returned, and errno.
PEEK = """
import ctypes
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
c, here = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(8)
part = Part(ctypes.addressof(here), 8)
print(c.process_vm_readv(1, ctypes.byref(part), 1, ctypes.byref(part), 1, 0), ctypes.get_errno())
"""


def test_E10_process_one_cannot_be_ended_stopped_or_traced_from_inside(box: Box) -> None:
    box.run("for s in KILL STOP TERM INT HUP SEGV ABRT QUIT TSTP USR1 PIPE; do kill -$s 1; done; kill -9 -1")
    box.run("kill -STOP -1")
    denied = box.run("cat /proc/1/mem; ls /proc/1/fd; ls /proc/1/map_files; cat /proc/1/environ; echo 1 > /proc/1/mem")
    assert len(re.findall("Permission denied|Operation not permitted", denied)) >= 4, denied
    attach = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.ptrace({}, 1, 0, 0), ctypes.get_errno())"
    for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
        assert box.python(attach.format(request)).split()[0] == "-1"
    assert box.python(PEEK).split() == ["-1", "1"]
    assert box.run("echo alive") == "alive\n"
    assert box.boxes.world.deaths == []


def test_E10_whoever_is_stopped_is_ended_by_the_deadline(box: Box) -> None:
    victim = box.begin("sleep 60", timeout_s=2.0)
    wait_until(lambda: "sleep 60" in box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '"), 10)
    box.begin("kill -STOP -1", timeout_s=1.0)()
    assert victim()["timed_out"]
    assert box.run("echo served") == "served\n"


@as_root
def test_E10_a_sandbox_that_dies_is_told_as_that_and_can_be_made_again(boxes: Boxes) -> None:
    with boxes.one("dying") as box:
        box.value("write_file", b"mine", path="kept")
        pending = []
        box.connection.start(boxes.world.operation("execute_command", command="sleep 60"), pending.append)
        box.value("health")
        os.kill(box.pid, signal.SIGKILL)
        wait_until(lambda: pending and boxes.world.deaths, 20)
        assert pending[0].error is not None
        assert pending[0].error.code == "outcome_unknown"
        assert boxes.world.deaths == [(box.id, "killed by SIGKILL")]
        wait_until(lambda: box.id not in boxes.backend.running(), 10)
        assert isinstance(box.do("execute_command", command="true").error, SandboxLost | NotStarted)
        assert boxes.backend.probe(box.id) is Liveness.DEAD
        boxes.world.deaths.clear()
    with boxes.one("dying") as again:
        assert again.read("kept") == b"mine"
