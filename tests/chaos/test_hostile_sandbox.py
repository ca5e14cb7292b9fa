"""Promises about a sandbox that turns on its node: it may break itself and nobody else."""

from __future__ import annotations

import pytest

from sandfleet import Sandbox
from sandfleet.errors import SandfleetError
from tests.chaos.fleet import Answers, Fleet, Gate, unique
from tests.services import wait_until

SOCKET = "/.sandfleet/run/s"

IMPOSTOR = """
import os, socket, sys
os.rename("/.sandfleet/run/s", "/.sandfleet/run/hidden")
server = socket.socket(socket.AF_UNIX)
server.bind("/.sandfleet/run/s")
os.chmod("/.sandfleet/run/s", 0o777)
server.listen(64)
open("/mnt/user-data/workspace/listening", "w").close()
while True:
    connection, _ = server.accept()
    connection.recv(65536)
    body = b'{"success": true, "data": {"proof": "00", "output": "forged", "exit_code": 0, "content": "forged"}}'
    head = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n"
    connection.sendall(head % len(body) + body)
    connection.close()
"""

MUTE = """
import os, socket, time
os.rename("/.sandfleet/run/s", "/.sandfleet/run/hidden")
server = socket.socket(socket.AF_UNIX)
server.bind("/.sandfleet/run/s")
os.chmod("/.sandfleet/run/s", 0o777)
server.listen(64)
open("/mnt/user-data/workspace/listening", "w").close()
time.sleep(600)
"""


def background(program: str) -> str:
    return f"setsid python3 {program} > /dev/null 2>&1 & until test -e listening; do sleep 0.02; done"


def attack_commands(victim_id: str) -> dict[str, str]:
    """Shell commands by name, run inside the hostile sandbox."""
    neighbour = f"../{victim_id[:16]}/s"
    return {
        "removed": f"rm -f {SOCKET}",
        "a link to the neighbour": f"rm -f {SOCKET}; ln -s {neighbour} {SOCKET}",
        "a link to the docker socket": f"rm -f {SOCKET}; ln -s /var/run/docker.sock {SOCKET}",
        "a regular file": f"rm -f {SOCKET}; echo forged > {SOCKET}",
        "a directory": f"rm -f {SOCKET}; mkdir {SOCKET}",
        "a fifo": f"rm -f {SOCKET}; mkfifo {SOCKET}",
        "a device of a thousand links": f"rm -f {SOCKET}; ln -s s {SOCKET}",
        "the whole directory read-only": "chmod 0 /.sandfleet/run",
        "an impostor that answers": background("impostor.py"),
        "an impostor that is mute": background("mute.py"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("attack", list(attack_commands("0" * 8)))
def test_a_sandbox_that_replaces_its_socket_gets_typed_errors_and_reaches_nobody_else(
    fleet: Fleet, attack: str
) -> None:
    thread = unique("hostile")
    with fleet.provider(queue_timeout_s=10.0, command_timeout_s=10.0) as provider:
        victim = provider.get(provider.acquire(f"{thread}-victim"))
        assert victim is not None
        victim.write_file("/mnt/user-data/workspace/name.txt", "victim")
        hostile = provider.get(provider.acquire(thread))
        assert hostile is not None
        hostile.write_file("/mnt/user-data/workspace/name.txt", "hostile")
        hostile.write_file("/mnt/user-data/workspace/impostor.py", IMPOSTOR)
        hostile.write_file("/mnt/user-data/workspace/mute.py", MUTE)
        hostile.run(attack_commands(victim.id)[attack])

        answers: Answers[str] = Answers(fleet)
        # More at once than the node has idle connections: some must open the socket anew.
        gates = [Gate(fleet, thread, f"gate{n}") for n in range(4)]
        for number, gate in enumerate(gates):
            handle = provider.get(hostile.id)
            assert handle is not None
            answers.ask(f"command{number}", lambda h=handle, g=gate: h.run(g.command + "; cat name.txt").stdout)
        for number in range(4):
            answers.ask(f"read{number}", lambda: _read(hostile))
        for gate in gates:
            gate.open()
        for name, answer in answers.all().items():
            if isinstance(answer, BaseException):
                assert isinstance(answer, SandfleetError), (name, repr(answer))
                assert answer.code != "internal", (name, repr(answer))
            else:
                assert answer == "hostile", f"{name} was answered by somebody else"

        assert victim.read_file("/mnt/user-data/workspace/name.txt") == "victim"
        assert victim.run("cat name.txt; ls").stdout == "victimname.txt\n"
        (view,) = [view for view in fleet.store.nodes() if view.node_id == "n1"]
        assert view.alive
        # Whatever it did to itself, its thread gets a working sandbox again.
        provider.destroy(hostile.id)
        wait_until(lambda: fleet.store.sandbox(hostile.id) is None, 10, story=lambda: fleet.story(hostile.id))
        fresh = provider.get(provider.acquire(thread))
        assert fresh is not None
        assert fresh.run("cat name.txt").stdout == "hostile"


def _read(sandbox: Sandbox) -> str:
    return sandbox.read_file("/mnt/user-data/workspace/name.txt")
