"""The wire under `RedisStore`: held connections, scripts by digest, errors in our own terms."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from sandfleet.config.sentinel import SCHEME
from sandfleet.connection import check_server, connect, translate
from sandfleet.errors import ConfigError, StoreUnavailable
from sandfleet.store.scripts import Script

__all__ = ["Link"]

#: How long behind Sentinels a server is taken for the primary without asking.
_ASK_AGAIN_S = 1.0
_FRESH_S = 0.005  # a connection idle for longer is looked at before use: the server may have gone meanwhile

#: Ends a SET whose value has been sent: it expires in a minute.
_PUT_TAIL = b"\r\n$2\r\nPX\r\n$5\r\n60000\r\n"


class Link:
    """Connections to one Redis, for many threads and across forks.

    redis-py's own pool and command layer cost as much as the round trip itself (78 µs for a PING against
    35 µs here), so idle connections are kept on a plain list, whose append and pop are atomic.
    """

    def __init__(self, url: str, *, prefix: str, name: str) -> None:
        self.url = url
        self.prefix = prefix
        self._name = name
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._checked = False
        self._idle: list[tuple[Any, float]] = []  # redis-py connections, whose methods have no types
        #: The server that connections lead to: behind Sentinels it changes.
        self._server: tuple[Any, Any] | None = None
        self._sentineled, self._asked_at = url.startswith(SCHEME), 0.0
        #: How often it has changed, and who is told.
        self.moves = 0
        self.on_move: Callable[[], None] | None = None
        self._client = connect(url, name=name)

    def run(self, script: Script, *args: str | int | bytes, decode: bool = True) -> Any:
        """Call a script; a server that forgot it is taught again.

        NOSCRIPT means that nothing ran, so sending it once more is safe.
        """
        conn = self._take()
        try:
            conn.send_packed_command(
                conn.pack_command("EVALSHA", script.sha, 1, self.prefix, *args), check_health=False
            )
            answer = conn.read_response(disable_decoding=not decode)
        except redis.exceptions.NoScriptError:
            return self._teach(conn, script, args, decode)
        except redis.ResponseError as exc:
            self._give(conn)
            raise translate(exc, self.url) from exc
        except redis.RedisError as exc:
            self._drop(conn)
            raise translate(exc, self.url) from exc
        except BaseException:
            self._drop(conn)
            raise
        self._idle.append((conn, time.monotonic()))
        return answer

    def command(self, *args: str | int | bytes, decode: bool = True) -> Any:
        """One plain command, sent once."""
        conn = self._take()
        try:
            conn.send_packed_command(conn.pack_command(*args), check_health=False)
            answer = conn.read_response(disable_decoding=not decode)
        except redis.ResponseError as exc:
            self._give(conn)
            raise translate(exc, self.url) from exc
        except redis.RedisError as exc:
            self._drop(conn)
            raise translate(exc, self.url) from exc
        except BaseException:
            self._drop(conn)
            raise
        self._give(conn)
        return answer

    def put(self, key: str, value: bytes | memoryview, script: Script, *args: str | int) -> Any:
        """SET ``key`` and call a script, which sees the value there, in one round trip; returns what the script does.

        The value goes out from where it lies: packing 1 MiB into a command, and its way through Lua, took more time
        than all the rest. The script decides how long the key lives; if it never runs, the key is gone in a minute.
        """
        conn, name = self._take(), key.encode()
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
        tail = conn.pack_command("EVALSHA", script.sha, 1, self.prefix, *args)
        try:
            conn.send_packed_command([head, value, _PUT_TAIL, *tail], check_health=False)
            stored, answer = _answer(conn), _answer(conn)
        except redis.RedisError as exc:
            self._drop(conn)
            raise translate(exc, self.url) from exc
        except BaseException:
            self._drop(conn)
            raise
        if isinstance(answer, redis.exceptions.NoScriptError) and not isinstance(stored, redis.ResponseError):
            return self._teach(conn, script, args, True)
        self._give(conn)
        for each in (stored, answer):
            if isinstance(each, redis.ResponseError):
                raise translate(each, self.url) from each
        return answer

    def close(self) -> None:
        """Close every idle connection; later calls raise."""
        self._closed = True
        while self._idle:
            with contextlib.suppress(IndexError):
                self._drop(self._idle.pop()[0])
        self._client.close()

    def _teach(self, conn: Any, script: Script, args: tuple[Any, ...], decode: bool) -> Any:
        self._give(conn)
        # SCRIPT LOAD first: newer servers evict scripts that are known from EVAL alone.
        self.command("SCRIPT", "LOAD", script.text)
        return self.command("EVAL", script.text, 1, self.prefix, *args, decode=decode)

    def _take(self) -> Any:
        if self._pid != os.getpid():
            self._after_fork()
        if self._closed:
            raise StoreUnavailable("the store is closed", reason="closed")
        if self._sentineled and time.monotonic() - self._asked_at > _ASK_AGAIN_S:
            self._ask_sentinels()
        while True:
            try:
                conn, since = self._idle.pop()
            except IndexError:
                return self._open()
            if self._sentineled and (conn.host, conn.port) != self._server:
                self._drop(conn)  # it was in use when the primary changed
                continue
            if time.monotonic() - since < _FRESH_S:
                return conn
            # Nothing is outstanding, so a readable connection is one that the server closed.
            try:
                if not conn.can_read(0):
                    return conn
            except redis.RedisError:
                pass
            self._drop(conn)

    def _give(self, conn: Any) -> None:
        self._idle.append((conn, time.monotonic()))

    def _drop(self, conn: Any) -> None:
        with contextlib.suppress(Exception):
            conn.disconnect()

    def _open(self) -> Any:
        pool = self._client.connection_pool
        conn = pool.connection_class(**pool.connection_kwargs)
        try:
            conn.connect()
            if not self._checked:
                conn.send_command("INFO")
                check_server(_parse_info(conn.read_response()), self.url)
                self._checked = True
        except ConfigError:
            self._drop(conn)
            raise
        except redis.RedisError as exc:
            self._drop(conn)
            raise translate(exc, self.url) from exc
        self._met((getattr(conn, "host", None), getattr(conn, "port", None)))
        return conn

    def _ask_sentinels(self) -> None:
        """A primary that hung may wake up and believe it still is one, so not even a connection that works is trusted
        for long. Sentinels that do not answer change nothing."""
        self._asked_at = time.monotonic()
        pool: Any = self._client.connection_pool
        with contextlib.suppress(redis.RedisError):
            self._met(pool.get_master_address())

    def _met(self, server: tuple[Any, Any]) -> None:
        """After a failover, talk to the new primary alone."""
        before, self._server = self._server, server
        if before not in (None, server):
            while self._idle:
                with contextlib.suppress(IndexError):
                    self._drop(self._idle.pop()[0])
            self.moves += 1
            if self.on_move is not None:
                self.on_move()

    def _after_fork(self) -> None:
        """The parent's sockets are the parent's: drop them unread (disconnect in a child only closes its own fd)."""
        with self._lock:
            if self._pid != os.getpid():
                self._idle = []
                self._client = connect(self.url, name=self._name)
                self._pid = os.getpid()


def _answer(conn: Any) -> Any:
    """The next answer, or the error that it is: another answer may follow on this connection."""
    try:
        return conn.read_response()
    except redis.ResponseError as exc:
        return exc


def _parse_info(text: str) -> dict[str, Any]:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key: value.strip() for key, value in pairs}
