"""A Redis with a replica and three Sentinels, all of them real processes that end with the test."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path

import redis

from tests.services import (
    LOOPBACK,
    START_DEADLINE_S,
    STOP_DEADLINE_S,
    dying_with_us,
    find_redis_binary,
    free_port,
    wait_until,
)

SERVICE = "fleet"
PASSWORD = "hunter/2"
#: How long a server may be silent before the Sentinels count it as down.
DOWN_AFTER_MS = 1000


class _Server:
    """One process, by its configuration file: Sentinels write into theirs."""

    def __init__(self, directory: Path, name: str, lines: list[str], *, sentinel: bool = False) -> None:
        self.name, self.port, self._sentinel = name, free_port(), sentinel
        self._log, self._config = directory / f"{name}.log", directory / f"{name}.conf"
        own = [f"port {self.port}", f"bind {LOOPBACK}", f"dir {directory}", *lines]
        self._config.write_text("\n".join(own) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [find_redis_binary(), str(self._config), *(["--sentinel"] if self._sentinel else [])]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(dying_with_us(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self.answers, START_DEADLINE_S, story=lambda: self._log.read_text(errors="replace"))

    def client(self) -> redis.Redis:
        password = None if self._sentinel else PASSWORD
        return redis.Redis(LOOPBACK, self.port, password=password, decode_responses=True, socket_timeout=2)

    def answers(self) -> bool:
        with contextlib.suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would; do nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_DEADLINE_S)
            self._process = None


class Sentineled:
    """A primary, its replica, and three Sentinels that agree with two voices. `url` is what a fleet is told."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        kept = [f"requirepass {PASSWORD}", f"masterauth {PASSWORD}", 'save ""', "repl-diskless-sync-delay 0"]
        kept += ["databases 16", "client-output-buffer-limit replica 0 0 0"]
        self.servers = [_Server(directory, "first", kept)]
        self.servers.append(_Server(directory, "second", [*kept, f"replicaof {LOOPBACK} {self.servers[0].port}"]))
        watched = [
            f"sentinel monitor {SERVICE} {LOOPBACK} {self.servers[0].port} 2",
            f"sentinel auth-pass {SERVICE} {PASSWORD}",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 3000",
        ]
        self.sentinels = [_Server(directory, f"sentinel-{n}", watched, sentinel=True) for n in (1, 2, 3)]

    @property
    def url(self) -> str:
        """What names the fleet's Redis."""
        hosts = ",".join(f"{LOOPBACK}:{sentinel.port}" for sentinel in self.sentinels)
        return f"sentinel://:{PASSWORD.replace('/', '%2F')}@{hosts}/1?service={SERVICE}"

    def start(self) -> None:
        """Start all, and return when the Sentinels know one another and the replica has its copy."""
        for server in (*self.servers, *self.sentinels):
            server.start()
        wait_until(self.in_order, 30, story=self.told)

    def primary(self) -> _Server | None:
        """Whom most Sentinels name."""
        ports = []
        for sentinel in self.sentinels:
            with contextlib.suppress(redis.RedisError), sentinel.client() as client:
                address = client.sentinel_get_master_addr_by_name(SERVICE)
                ports.append(int(address[1]) if address else 0)
        found = [server for server in self.servers if ports.count(server.port) >= 2]
        return found[0] if found else None

    def in_order(self) -> bool:
        """One primary whose replica follows it, and Sentinels that would agree on another."""
        primary = self.primary()
        if primary is None or not all(server.answers() for server in self.servers):
            return False
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                state = client.sentinel_master(SERVICE)
                if state["num-other-sentinels"] != 2 or state["num-slaves"] != 1 or state["is_odown"]:
                    return False
        [other] = [server for server in self.servers if server is not primary]
        with other.client() as client:
            told = client.info("replication")
        return (told["role"], told.get("master_link_status"), told.get("master_port")) == ("slave", "up", primary.port)

    def lose_primary(self, how: signal.Signals) -> _Server:
        """Kill (SIGKILL) or pause (SIGSTOP) the primary; returns it once another one has been named."""
        lost = self.primary()
        assert lost is not None, self.told()
        if how is signal.SIGSTOP:
            lost.send(how)
        else:
            lost.kill()
        wait_until(lambda: (named := self.primary()) is not None and named is not lost, 30, story=self.told)
        return lost

    def told(self) -> str:
        """What the Sentinels wrote last."""
        return "\n".join(
            f"--- {server.name}\n" + "\n".join(server._log.read_text(errors="replace").splitlines()[-8:])
            for server in (*self.servers, *self.sentinels)
        )

    def close(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.kill()
