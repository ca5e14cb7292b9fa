"""Code in a sandbox turns on what serves it there: process 1, its socket, its port, the program that the node puts in.

Whatever it does is done to itself: the node keeps running and answers with typed errors, the neighbour is served, and
no request of one sandbox ever arrives in another, at Docker, or anywhere else on the host (the cross-over of DESIGN).
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandfleet.backends import Completion, Liveness
from sandfleet.errors import InternalError, NotStarted, OutcomeUnknown, SandboxLost, SandfleetError
from sandfleet_workers import endpoint_files, endpoint_ops
from sandfleet_workers.endpoint import EndpointConnection
from sandfleet_workers.endpoint_socket import UnixEndpoint
from tests.security.boxes import Box, Boxes, MemoryWatch, as_root, on
from tests.security.grounds import WORK, ground
from tests.services import wait_until

pytestmark = pytest.mark.slow

SOCKET = "/.sandfleet/run/s"
MIB = 1024**2
#: How an operation may end that did not reach its sandbox, or whose answer was no answer.
TYPED = (SandboxLost, NotStarted, OutcomeUnknown, InternalError)


# --- process 1 -----------------------------------------------------------------------------------

MEDDLE = """
import ctypes, os, resource
def attempt(name, work):
    try:
        work()
    except OSError:
        return
    print(name)
libc = ctypes.CDLL(None, use_errno=True)
def ptrace():
    if libc.ptrace(16, 1, 0, 0):
        raise OSError(ctypes.get_errno())
attempt("ptrace", ptrace)
for name in ("mem", "environ", "maps", "fd/0", "cwd", "auxv", "syscall"):
    attempt(name, lambda: open("/proc/1/" + name).read(1))
attempt("fds", lambda: os.listdir("/proc/1/fd"))
attempt("root", lambda: os.listdir("/proc/1/root/"))
for name in ("mem", "oom_score_adj", "clear_refs", "coredump_filter", "setgroups", "uid_map"):
    attempt("write " + name, lambda: open("/proc/1/" + name, "w").write("1"))
attempt("pidfd_getfd", lambda: libc.syscall(438, os.pidfd_open(1), 0, 0) >= 0 or (_ for _ in ()).throw(OSError()))
for number in range(1, 65):
    attempt("", lambda: os.kill(1, number))
"""


def test_E10_nothing_inside_ends_stops_or_reads_process_1(box: Box) -> None:
    pid = box.pid
    assert box.python(MEDDLE).strip() == ""
    for attack in ("kill -9 1", "kill -STOP 1", "kill -9 -1", "kill -STOP -1; true", "kill -s SEGV -- -1"):
        box.result(attack, timeout_s=2.0)
    assert box.run("echo alive") == "alive\n"
    assert box.pid == pid
    assert box.boxes.backend.probe(box.id) is Liveness.ALIVE


LIMIT = """
import resource, sys
resource.prlimit(1, getattr(resource, sys.argv[1]), (0, 0))
"""


@pytest.mark.parametrize("limit", ["RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CPU"])
def test_E10_nobody_inside_sets_limits_for_process_1(box: Box, limit: str) -> None:
    assert "PermissionError" in box.python(LIMIT, limit)
    assert box.python("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9)); print('mine')") == "mine\n"
    assert box.run("ulimit -n 64; ulimit -n") == "64\n"


# --- the socket ----------------------------------------------------------------------------------


@contextmanager
def under(box: Box, attack: str) -> Iterator[None]:
    """Meanwhile ``attack`` has happened in the sandbox, and its command holds the node's one open socket to it, so that
    every operation has to open another one. Where the node keeps the directory from the sandbox (containers of a
    root worker), it is handed over as one that is not root leaves it."""
    if os.geteuid() == 0:
        owner = (box.workspace).stat()
        os.chown(box.plan.run_dir, owner.st_uid, owner.st_gid)
    result = box.begin(f"{attack}; touch attacked; until test -e go; do sleep 0.02; done; echo survived", 60)
    wait_until((box.workspace / "attacked").exists, 20)
    try:
        yield
    finally:
        (box.workspace / "go").touch()
    assert result()["stdout"].endswith("survived\n"), "the socket that was open before is still the sandbox's own"


def ask(box: Box) -> list[Completion]:
    """A read, a write and a command, each over a socket of its own."""
    return [
        box.do("stat", path="/etc/hostname"),
        box.do("write_file", b"planted", path="written"),
        box.do("execute_command", command="touch /mnt/user-data/workspace/written", timeout_s=1.0),
    ]


def assert_nobody_was_reached(ended: list[Completion], box: Box, neighbour: Box) -> None:
    for completion in ended:
        assert completion.value is None
        assert isinstance(completion.error, TYPED), repr(completion.error)
    for one in (box, neighbour):
        assert not (one.workspace / "written").exists()
    assert neighbour.run("echo served; ls") == "served\n"


@as_root
@on("docker")
def test_the_sandbox_cannot_touch_its_socket(box: Box) -> None:
    for attack in (f"rm -f {SOCKET}", f"mv {SOCKET} /tmp/s", f"ln -sf /tmp/x {SOCKET}", "touch /.sandfleet/run/x",
                   f"chmod 777 {SOCKET}/..", "mkdir /.sandfleet/run/x"):  # fmt: skip
        assert box.result(attack)["exit_code"] != 0, attack
    assert os.listdir(box.plan.run_dir) == ["s"]


class Listener:
    """A socket of the host, such as Docker's, that counts who comes."""

    def __init__(self, path: Path) -> None:
        self.path, self.visits = path, 0
        self._listener = socket.socket(socket.AF_UNIX)
        folder = os.open(path.parent, os.O_PATH)
        self._listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        path.chmod(0o777)
        self._listener.listen()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()

    def _count(self) -> None:
        while True:
            try:
                visitor, _ = self._listener.accept()
            except OSError:
                return
            self.visits += 1
            visitor.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    made = Listener(tmp_path / "listener")
    yield made
    made.close()


#: What is put in the socket's place: with the neighbour's run directory, its name, and a listener of the host.
REPLACEMENTS = {
    "nothing": "true",
    "a link to the neighbour's": "ln -s {theirs}/s {socket}",
    "a relative link to the neighbour's": "ln -s ../{name}/s {socket}",
    "a link to Docker's": "ln -s /var/run/docker.sock {socket}",
    "a link to a listener of the host": "ln -s {listener} {socket}",
    "a file": "echo forged > {socket}",
    "a fifo": "mkfifo {socket}",
    "a directory": "mkdir {socket}",
    "a link to itself": "ln -s s {socket}",
}


@pytest.mark.parametrize("what", REPLACEMENTS)
def test_crossover_whatever_replaces_the_socket_leads_nowhere(
    boxes: Boxes, neighbour: Box, listener: Listener, what: str
) -> None:
    theirs = neighbour.plan.run_dir
    put = REPLACEMENTS[what].format(theirs=theirs, name=theirs.name, listener=listener.path, socket=SOCKET)
    with boxes.one() as box:
        before = boxes.backend.running()
        with under(box, f"rm -f {SOCKET}; {put}"):
            assert_nobody_was_reached(ask(box), box, neighbour)
            assert boxes.backend.probe(box.id) is Liveness.UNKNOWN
        assert boxes.backend.running() == before
    assert listener.visits == 0
    assert not box.plan.run_dir.exists()


def test_crossover_a_neighbours_socket_moved_here_proves_nothing(boxes: Boxes, neighbour: Box) -> None:
    """Not by a link, but the very socket: the same inode, as whoever could rename across sandboxes would put it."""
    with boxes.one() as box, under(box, f"rm -f {SOCKET}"):
        os.link(neighbour.plan.run_dir / "s", box.plan.run_dir / "s")
        for pid_is_seen in (True, False):
            if not pid_is_seen:
                endpoint_of(box).pid = None
            ended = ask(box)
            assert_nobody_was_reached(ended, box, neighbour)
            assert all(isinstance(completion.error, SandboxLost) for completion in ended)


def test_crossover_a_run_directory_full_of_rubbish_goes_with_its_sandbox(boxes: Boxes, neighbour: Box) -> None:
    rubbish = """
import os
os.chdir("/.sandfleet/run")
for number in range(500):
    open("f%d" % number, "w").close()
    os.symlink("/etc", "l%d" % number)
os.mkfifo("fifo")
for level in range(1500):
    os.mkdir("d")
    os.chdir("d")
os.chmod("/.sandfleet/run/d", 0)
"""
    with boxes.one() as box:
        (box.workspace / "rubbish.py").write_text(rubbish)
        with under(box, "python3 rubbish.py; rm -f rubbish.py"):
            assert box.run("echo mine") == "mine\n"
            assert neighbour.run("echo served") == "served\n"
    assert not box.plan.run_dir.exists()
    assert os.path.isdir("/etc")


# --- impostors -----------------------------------------------------------------------------------

#: Takes the socket's place. ``relayed`` ones have the true sandboxd prove the key for them, and lie afterwards.
IMPOSTOR = r"""
import os, socket, sys, threading, time
lie, relayed, place = sys.argv[1], sys.argv[2] == "relayed", "/.sandfleet/run/s"
os.rename(place, "/.sandfleet/run/hidden")
server = socket.socket(socket.AF_UNIX)
server.bind(place)
os.chmod(place, 0o777)
server.listen(64)
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
FORGED = b'{"success": true, "data": {"proof": "00", "output": "forged", "exit_code": 0, "content": "forged"}}'

def answer(connection):
    if lie == "forged":
        connection.sendall(OK + b"content-length: %d\r\n\r\n" % len(FORGED) + FORGED)
    elif lie == "endless header":
        connection.sendall(OK)
        while True:
            connection.sendall(b"x: y\r\n" * 1000)
    elif lie == "a gigabyte":
        connection.sendall(OK + b"content-length: 1000000000\r\n\r\n")
        for _ in range(1000):
            connection.sendall(b"x" * 1000000)
    elif lie == "half an answer":
        connection.sendall(OK + b"content-length: 1000\r\n\r\n" + FORGED)
    elif lie == "half JSON":
        connection.sendall(OK + b"content-length: 20\r\n\r\n" + FORGED[:20])
    elif lie == "a drip":
        for byte in OK * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
    elif lie == "silence":
        time.sleep(600)

def serve(connection):
    with connection:
        try:
            request = connection.recv(65536)
            if relayed:
                with socket.socket(socket.AF_UNIX) as real:
                    real.connect("/.sandfleet/run/hidden")
                    real.sendall(request)
                    connection.sendall(real.recv(65536))
                connection.recv(65536)
            answer(connection)
        except OSError:
            pass

open("/mnt/user-data/workspace/listening", "w").close()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
HOWS = ["another process", "direct", "relayed"]
LIES = ["forged", "endless header", "a gigabyte", "half an answer", "half JSON", "a drip", "silence"]
START = "setsid python3 impostor.py '{lie}' {how} > /dev/null 2>&1 & until test -e listening; do sleep 0.02; done"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps silent is given up sooner than a node would."""
    monkeypatch.setattr(endpoint_ops, "_GUARD_EXTRA_S", 0.5)
    monkeypatch.setattr(endpoint_files, "_GUARD_EXTRA_S", 0.5)


def ask_briefly(box: Box) -> list[Completion]:
    """A search and a command with times of their own, which end even where nobody answers."""
    return [
        box.do("glob", path=".", pattern="*", timeout_s=0.2),
        box.do("execute_command", command="touch /mnt/user-data/workspace/written", timeout_s=0.2),
    ]


#: What a sandbox says about itself once it has proved to be itself is its own business: not ("forged", "relayed").
IMPOSTORS = [(lie, how) for how in HOWS for lie in LIES if (lie, how) != ("forged", "relayed")]


@pytest.mark.parametrize(("lie", "how"), IMPOSTORS)
def test_an_impostor_at_the_socket_is_never_believed_and_holds_nobody(
    boxes: Boxes, neighbour: Box, hurried: None, lie: str, how: str
) -> None:
    """``direct`` and ``relayed``: this worker runs in a container of its own, where it cannot see who listens."""
    with boxes.one() as box:
        (box.workspace / "impostor.py").write_text(IMPOSTOR)
        with under(box, START.format(lie=lie, how=how)):
            connection = box.connection
            assert isinstance(connection, EndpointConnection)
            connection._hello_s, connection._guard_tick_s = 0.5, 0.1
            if how != "another process":
                endpoint_of(box).pid = None
            with MemoryWatch() as memory:
                ended = ask_briefly(box)
            assert_nobody_was_reached(ended, box, neighbour)
            assert memory.grown_bytes < 50 * MIB
            replaced = {isinstance(completion.error, SandboxLost) for completion in ended}
            if how != "direct":  # who is direct and slow is given up before it gave any proof
                assert replaced == {how == "another process"}


def endpoint_of(box: Box) -> UnixEndpoint:
    connection = box.connection
    assert isinstance(connection, EndpointConnection)
    endpoint = connection._endpoint
    assert isinstance(endpoint, UnixEndpoint)
    return endpoint


# --- floods and famine ---------------------------------------------------------------------------

FLOOD = r"""
import os, socket, time
held, room = [], True
junk = [b"", b"GET /v1/sandbox HTTP/1.1\r\nHost: x\r\n", b"\0" * 70000, b"GET /" + b"a" * 60000,
        b"POST /v1/bash/exec HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"PUT /v1/sandfleet/raw HTTP/1.1\r\nContent-Length: 1000000\r\n\r\nx"]
for number in range(3000):
    one = socket.socket(socket.AF_UNIX)
    one.setblocking(False)
    try:
        one.connect("/.sandfleet/run/s")
        one.send(junk[number % len(junk)])
    except OSError:
        pass
    held.append(one)
open("/mnt/user-data/workspace/flooded", "w").close()
while not os.path.exists("/mnt/user-data/workspace/go"):
    time.sleep(0.02)
"""
FAMINE = r"""
import os
def child(work):
    if os.fork() == 0:
        try:
            work()
        finally:
            os._exit(0)
def burn():
    while True:
        pass
def grow():
    held = []
    while True:
        held.append(bytearray(8 << 20))
def bomb():
    while True:
        try:
            os.fork()
        except OSError:
            pass
open("/mnt/user-data/workspace/starving", "w").close()
for work in (burn, burn, burn, burn, grow, bomb):
    child(work)
burn()
"""


def assert_answered_or_told(ended: list[Completion]) -> None:
    for completion in ended:
        assert completion.error is None or isinstance(completion.error, SandfleetError), completion


def test_a_flooded_sandbox_answers_or_says_that_it_does_not(boxes: Boxes, neighbour: Box, hurried: None) -> None:
    with boxes.one() as box:
        (box.workspace / "flood.py").write_text(FLOOD)
        with under(box, "python3 flood.py > /dev/null 2>&1 & until test -e flooded; do sleep 0.02; done"):
            for _ in range(5):
                assert_answered_or_told(ask_briefly(box))
                assert neighbour.run("echo served") == "served\n"
        wait_until(lambda: box.do("stat", path=".").error is None, 20)
        assert box.run("echo mine") == "mine\n"


@on("docker")
def test_a_starved_sandbox_answers_or_says_that_it_does_not(boxes: Boxes, neighbour: Box, hurried: None) -> None:
    """A fork bomb, what burns all cores and what takes all memory at once, and the worker keeps asking."""
    with boxes.one() as box:
        (box.workspace / "famine.py").write_text(FAMINE)
        ended: list[Completion] = []
        op = boxes.world.operation("execute_command", command="python3 famine.py", timeout_s=8.0)
        with MemoryWatch() as memory:
            box.connection.start(op, ended.append)
            wait_until(lambda: ended or (box.workspace / "starving").exists(), 20)
            rounds = 0
            while not ended:
                assert_answered_or_told(ask_briefly(box))
                assert neighbour.run("echo served") == "served\n"
                rounds += 1
        assert rounds > 0
        assert memory.grown_bytes < 50 * MIB
        assert_answered_or_told(ended)
    assert box.id not in boxes.backend.running()
    with boxes.one(box.plan.identity.thread_id) as again:
        assert again.run("echo well") == "well\n"


@pytest.mark.docker
def test_a_worker_outlives_a_starved_sandbox_and_gives_its_thread_another(tmp_path: Path) -> None:
    """The same against a fleet: its processes stay, and the thread is served again after its sandbox was destroyed."""
    with ground("docker", tmp_path, replicas=4) as field:
        hostile, neighbour = field.sandbox("hostile"), field.sandbox("neighbour")
        hostile.write_file(f"{WORK}/famine.py", FAMINE)
        ended: list[object] = []

        def told(call: Callable[[], object]) -> object:
            try:
                return call()
            except SandfleetError as exc:
                return exc

        attack = threading.Thread(
            target=lambda: ended.append(told(lambda: hostile.run("python3 famine.py", timeout_s=6.0)))
        )
        attack.start()
        while attack.is_alive():
            told(lambda: hostile.run("true", timeout_s=1.0))
            assert neighbour.run("echo served").stdout == "served\n"
        assert len(ended) == 1, "any answer or typed error; nothing else was raised"
        field.provider.destroy(hostile.id)
        assert field.sandbox("hostile").run("ls").stdout.split()[0] == "famine.py"
        assert [view.alive for view in field.stack.store.nodes()] == [True]
        field.assert_untouched()


# --- with a network ------------------------------------------------------------------------------

TAKE_PORT = """
import socket
for address in ("", "0.0.0.0", "127.0.0.1", "::", socket.gethostbyname(socket.gethostname())):
    one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        one.bind((address, 8080))
        one.listen()
    except OSError as exc:
        print(exc.errno)
    else:
        print("took", repr(address))
"""


@on("docker-full")
def test_the_port_of_a_sandbox_with_a_network_cannot_be_taken(box: Box) -> None:
    told = box.python(TAKE_PORT).splitlines()
    assert set(told) <= {str(errno.EADDRINUSE), str(errno.EAFNOSUPPORT), str(errno.EADDRNOTAVAIL)}, told
    assert len(told) == 5
    assert box.run("echo mine") == "mine\n"
