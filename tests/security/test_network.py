"""The network: the cases N of the catalogue, without one (the default) and with ``network_mode: full``.

What `full` does not promise (N1, N2: addresses of the host and of the cloud's metadata service) is said in SECURITY.md.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.security.boxes import Box, Boxes, on, opened
from tests.services import require, wait_until

#: Says for each ``kind/host/port`` how an attempt to get there ended: `reached`, or the error's name.
REACH = """
import errno, json, os, socket, sys, threading
told = {}
def reach(what):
    kind, host, port = what.split("/")
    kind = socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=kind)[0]
        with socket.socket(family, kind) as sock:
            sock.settimeout(3)
            sock.connect(address)
            if kind == socket.SOCK_DGRAM:
                sock.send(b"hello")
                sock.recv(99)
        told[what] = "reached"
    except socket.gaierror:
        told[what] = "no such name"
    except OSError as exc:
        told[what] = errno.errorcode.get(exc.errno, type(exc).__name__)
threads = [threading.Thread(target=reach, args=(what,)) for what in sys.argv[1:]]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(told))
"""
#: What an attempt may say when there is no way, and when somebody on it lets nothing through.
NO_WAY = {"no such name", "ENETUNREACH", "EHOSTUNREACH", "EACCES", "EPERM", "EADDRNOTAVAIL", "EINVAL"}
DROPPED = NO_WAY | {"ECONNREFUSED", "ETIMEDOUT", "TimeoutError"}

METADATA = (
    "169.254.169.254", "0251.254.169.254", "0xa9fea9fe", "2852039166", "169.254.170.2", "169.254.169.123",
    "fd00:ec2::254", "100.100.100.200", "metadata.google.internal", "metadata", "instance-data", "168.63.129.16",
)  # fmt: skip


def reach(box: Box, *targets: str) -> dict[str, str]:
    """How attempts from a box ended."""
    told: dict[str, str] = json.loads(box.python(REACH, *targets, timeout_s=15.0))
    return told


@pytest.fixture(scope="module")
def listeners() -> Iterator[Callable[[], list[str]]]:
    """TCP and UDP servers on all addresses of this host; what is called gives the peers they have seen so far."""
    seen: list[str] = []
    with contextlib.ExitStack() as held:
        tcp = held.enter_context(socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        port = tcp.getsockname()[1]
        udp = held.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        udp.bind(("", port))

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, peer = tcp.accept()
                    seen.append(str(peer[0]))
                    sock.close()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    _, peer = udp.recvfrom(99)
                    if peer is None:
                        return  # it was shut down
                    seen.append(str(peer[0]))
                    udp.sendto(b"hello", peer)

        threads = [threading.Thread(target=work, daemon=True) for work in (accept, answer)]
        for thread in threads:
            thread.start()
        heard = _Heard(seen, port)
        yield heard
        for sock in (tcp, udp):  # closing alone would leave the threads waiting
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)


class _Heard:
    def __init__(self, seen: list[str], port: int) -> None:
        self._seen, self.port = seen, port

    def __call__(self) -> list[str]:
        return list(self._seen)


def addresses_of_this_host() -> list[str]:
    """Every address of every interface here, bridges too."""
    found = [each.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses
             if each.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
    return sorted(set(found))


# --- what is out there ---------------------------------------------------------------------------


def test_N1_the_metadata_service_is_out_of_reach_under_any_name(box: Box) -> None:
    told = reach(box, *(f"tcp/{host}/80" for host in METADATA), *(f"udp/{host}/53" for host in METADATA[:4]))
    assert set(told.values()) <= NO_WAY, told


def test_N1_there_is_no_way_out_at_all(box: Box) -> None:
    assert box.run("cat /proc/net/dev | tail -n +3 | cut -d: -f1").split() == ["lo"]
    assert box.run("cat /proc/net/route").splitlines()[1:] == []
    ways = [line.split() for line in box.run("cat /proc/net/ipv6_route 2>/dev/null").splitlines()]
    assert {way[-1] for way in ways} <= {"lo"}
    assert "no such name" in reach(box, "tcp/example.com/443").values()


def test_N2_nothing_of_the_host_is_in_reach(box: Box, listeners: Any, redis_server: str) -> None:
    """Its services at each of its addresses, the bridge's gateway, Redis, an engine's port."""
    require("redis")
    here = addresses_of_this_host()
    before = len(listeners())
    with socket.create_connection(("127.0.0.1", listeners.port), 5):
        pass
    wait_until(lambda: len(listeners()) > before, 10)  # it would tell
    redis_port = int(re.findall(r":(\d+)/?", redis_server)[-1])
    targets = [f"{kind}/{host}/{listeners.port}" for kind in ("tcp", "udp") for host in here]
    targets += [f"tcp/{host}/{port}" for host in ("127.0.0.1", "172.17.0.1", "host.docker.internal", "gateway")
                for port in (redis_port, 6379, 2375, 2376, 5555, 22)]  # fmt: skip
    before = len(listeners())
    told = reach(box, *targets)
    own = {what for what in told if "/127." in what or "/::1/" in what}
    assert {told[what] for what in told if what not in own} <= NO_WAY, told
    assert {told[what] for what in own} <= NO_WAY | {"ECONNREFUSED"}, "its own loopback, where nobody listens"
    assert listeners()[before:] == []


# --- neighbours ----------------------------------------------------------------------------------

#: Listens with TCP and UDP on all addresses and answers whoever comes; leaves its process id.
SERVE = """
import os, socket, threading
tcp = socket.create_server(("", 7777), family=socket.AF_INET6, dualstack_ipv6=True) if socket.has_dualstack_ipv6() \\
    else socket.create_server(("", 7777))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("", 7777))
def answer():
    while True:
        _, peer = udp.recvfrom(99)
        udp.sendto(b"hello", peer)
threading.Thread(target=answer, daemon=True).start()
open("/tmp/serving.new", "w").write(str(os.getpid()))
os.rename("/tmp/serving.new", "/tmp/serving")
while True:
    tcp.accept()[0].close()
"""


@on("docker", "docker-full", "local")
def test_N3_a_neighbour_cannot_be_reached(boxes: Boxes, box: Box, neighbour: Box) -> None:
    neighbour.value("write_file", SERVE.encode(), path="serve.py")
    serving = neighbour.begin("exec python3 serve.py", timeout_s=30.0)
    assert neighbour.run("until [ -e /tmp/serving ]; do sleep 0.05; done; echo up", timeout_s=15.0) == "up\n"
    its = neighbour.run("hostname -I 2>/dev/null || ip -o addr | awk '{print $4}'").split()
    its = [each for each in its if not ipaddress.ip_address(each).is_loopback]
    assert bool(its) is (boxes.kind == "docker-full"), its
    assert neighbour.run("cat /proc/net/if_inet6 2>/dev/null | grep -v ' lo$'") == "", "no IPv6, which has rules apart"
    # It does answer those whom it can hear, or this would prove nothing.
    assert set(reach(neighbour, "tcp/127.0.0.1/7777", "udp/127.0.0.1/7777").values()) == {"reached"}
    for address in its:
        with socket.create_connection((address, 7777), 5):
            pass  # the host reaches it, and so does the node
    targets = [f"{kind}/{host}/7777" for kind in ("tcp", "udp") for host in (*its, "127.0.0.1", "sandbox", "0.0.0.0")]
    told = reach(box, *targets, *(f"tcp/{host}/8080" for host in its))
    assert set(told.values()) <= DROPPED, told
    neighbour.run("kill $(cat /tmp/serving); rm /tmp/serving")
    assert serving()["signal"] == "SIGTERM"


@on("docker-full")
def test_N3_nor_one_of_another_deployment(boxes: Boxes, box: Box, tmp_path: Path) -> None:
    with opened("docker-full", tmp_path) as others, others.one() as stranger:
        (address,) = stranger.run("hostname -I").split()
        with socket.create_connection((address, 8080), 5):
            pass
        assert set(reach(box, f"tcp/{address}/8080", f"udp/{address}/8080").values()) <= DROPPED
        (back,) = box.run("hostname -I").split()
        assert set(reach(stranger, f"tcp/{back}/8080").values()) <= DROPPED


def test_N3_not_by_sockets_without_a_file_or_by_memory_either(box: Box, neighbour: Box) -> None:
    """Abstract sockets, System V and POSIX shared memory, message queues, shared process ids."""
    make = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + 'meet'); s.listen(); time.sleep(60)"
    held = neighbour.begin(f'echo secret > /dev/shm/meet; ipcmk -M 100 > /dev/null; exec python3 -c "{make}"', 20.0)
    assert neighbour.run("until grep -q @meet /proc/net/unix; do sleep 0.05; done; echo up", timeout_s=10.0) == "up\n"
    assert "@meet" not in box.run("cat /proc/net/unix")
    connect = "import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + 'meet')"
    assert "Connection refused" in box.python(connect)
    assert box.code("stat", path="/dev/shm/meet") == "path_not_found"
    assert len(neighbour.run("cat /proc/sysvipc/shm").splitlines()) == 2
    assert len(box.run("cat /proc/sysvipc/shm").splitlines()) == 1
    assert "meet" not in box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -v grep | grep sleep")
    neighbour.run("kill -9 -1; ipcrm --all=shm; rm /dev/shm/meet")
    assert held()["signal"] == "SIGKILL"


# --- the way in ----------------------------------------------------------------------------------


@on("docker", "docker-full")
def test_N7_no_port_is_published(boxes: Boxes, box: Box) -> None:
    told = json.loads(subprocess.run(["docker", "inspect", box.container], check=True, capture_output=True).stdout)[0]
    assert not told["HostConfig"]["PortBindings"]
    assert told["HostConfig"]["PublishAllPorts"] is False
    assert not any(told["NetworkSettings"]["Ports"].values())
    assert subprocess.run(["docker", "port", box.container], check=True, capture_output=True).stdout == b""


@on("docker", "docker-full", "local")
def test_N7_nobody_on_this_host_began_to_listen(boxes: Boxes, box: Box) -> None:
    """What a start of a sandbox makes this machine listen at, found by the processes that belong to it."""
    with boxes.one() as another:
        ours = box.host_pids() | another.host_pids() | {os.getpid()}
        mine = {each.laddr.port for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}
        at = [each for each in psutil.net_connections() if each.status == psutil.CONN_LISTEN and each.pid in ours]
        assert {each.laddr.port for each in at} <= mine
        assert not [each for each in psutil.process_iter(["cmdline"]) if _is_proxy_of(each, another)]


def _is_proxy_of(process: psutil.Process, box: Box) -> bool:
    """Whether it is an engine's process that hands a port of the host on to a box."""
    words = process.info["cmdline"] or []
    if not words or not words[0].endswith("docker-proxy"):
        return False
    return any(address in words for address in box.run("hostname -I").split())


@on("docker-full")
def test_N7_who_gets_to_it_needs_the_token(box: Box) -> None:
    (address,) = box.run("hostname -I").split()
    routes = ("GET /v1/sandbox", "GET /v1/sandfleet/hello?challenge=00", "POST /v1/bash/exec", "GET /", "PUT /x")
    for credentials in ("", "Authorization: Bearer x\r\n", "Authorization: Basic eDp4\r\n", "X-Token: \r\n"):
        for route in routes:
            body = b'{"command": "touch /tmp/stranger"}'
            head = f"{route} HTTP/1.1\r\nHost: x\r\n{credentials}Content-Length: {len(body)}\r\n\r\n"
            with socket.create_connection((address, 8080), 5) as stranger:
                stranger.sendall(head.encode() + body)
                assert b" 401 " in stranger.recv(4096).split(b"\r\n")[0], (route, credentials)
    assert box.code("stat", path="/tmp/stranger") == "path_not_found"
    # And who is inside does not find it.
    seen = box.run("env; cat /proc/[0-9]*/environ /proc/1/cmdline /proc/1/environ; cat /.sandfleet/run/* 2>&1")
    assert "token" not in seen.lower()


# --- raw ones ------------------------------------------------------------------------------------

RAW = """
import errno, socket
attempts = {
    "packets": (socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)),
    "cooked packets": (socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)),
    "icmp": (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "tcp": (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP),
    "ip": (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
    "icmp6": (socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
}
for name, how in attempts.items():
    try:
        socket.socket(*how)
        print(name, "made")
    except OSError as exc:
        print(name, errno.errorcode[exc.errno])
"""


@on("docker", "docker-full", "local")
def test_N8_nobody_makes_packets_of_his_own(box: Box) -> None:
    told = box.python(RAW).splitlines()
    assert len(told) == 6, told
    assert {line.rsplit(" ", 1)[1] for line in told} <= {"EPERM", "EACCES", "EAFNOSUPPORT"}, told


@on("docker", "docker-full", "local")
def test_N8_nobody_changes_the_interfaces_routes_or_rules(box: Box) -> None:
    change = """
import ctypes, errno, fcntl, socket, struct
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for what, request in (("address", 0x8916), ("flags", 0x8914), ("hardware address", 0x8924)):
    try:
        fcntl.ioctl(sock, request, struct.pack("16sH14s", b"lo", 1, b""))
        print(what, "changed")
    except OSError as exc:
        print(what, errno.errorcode[exc.errno])
try:
    sock.setsockopt(socket.SOL_IP, 64, b"\\0" * 40)  # IPT_SO_SET_REPLACE
    print("rules changed")
except OSError as exc:
    print("rules", errno.errorcode[exc.errno])
try:
    sock.setsockopt(socket.SOL_IP, 19, 1)  # IP_TRANSPARENT
    print("others' addresses taken")
except OSError as exc:
    print("transparent", errno.errorcode[exc.errno])
"""
    told = box.python(change).splitlines()
    assert len(told) == 5, told
    assert not [line for line in told if "changed" in line or "taken" in line], told
    assert "done" not in box.run("echo 1 > /proc/sys/net/ipv4/ip_forward 2>/dev/null && echo done")
