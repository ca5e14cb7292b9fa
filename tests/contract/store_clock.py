"""One clock for two stores: what ends after a while ends in both at the same step, however long the steps take.

A memory store takes any clock. Redis has its own, so here its scripts are told the time, which stands still until the
test moves it. Keys that the server itself expires (hours; ten minutes for what was lost) still follow the server's.
"""

from __future__ import annotations

import functools
import hashlib
import time
from typing import Any

from sandfleet.store.link import Link
from sandfleet.store.scripts import Script
from tests.contract.store_fixtures import RedisWorld


class Clock:
    """Milliseconds since 1970 that pass when `pass_ms` says so; they begin now."""

    def __init__(self) -> None:
        self.ms = self.began_ms = int(time.time() * 1000)

    def __call__(self) -> int:
        return self.ms

    def pass_ms(self, ms: int) -> None:
        self.ms += ms


class ToldLink(Link):
    """A link whose server takes the clock's word for the time."""

    def __init__(self, url: str, *, prefix: str, clock: Clock) -> None:
        super().__init__(url, prefix=prefix, name="sandfleet")
        self._clock = clock
        self._told_ms = 0

    def run(self, script: Script, *args: str | int | bytes, decode: bool = True) -> Any:
        if self._told_ms != self._clock.ms:
            self._told_ms = self._clock.ms
            super().command("SET", f"{self.prefix}clock", self._told_ms)
        return super().run(_told(script), *args, decode=decode)

    def command(self, *args: str | int | bytes, decode: bool = True) -> Any:
        if args == ("TIME",):
            return divmod(self._clock.ms * 1000, 1_000_000)
        return super().command(*args, decode=decode)

    def forget(self) -> None:
        """The server has lost what it was told."""
        self._told_ms = 0


@functools.cache
def _told(script: Script) -> Script:
    text = script.text.replace("call('TIME')", "told_time()")
    text = text.replace("\n", _TOLD_TIME, 1)
    assert "'TIME'" not in text
    return Script(script.name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_TOLD_TIME = """
local function told_time()
  local ms = tonumber(call('GET', P .. 'clock'))
  return { math.floor(ms / 1000), ms % 1000 * 1000 }
end
"""


class ToldRedisWorld(RedisWorld):
    """A `RedisWorld` whose time is the clock's."""

    def __init__(self, url: str, prefix: str, clock: Clock) -> None:
        super().__init__(url, prefix)
        self.redis_store._link.close()
        self.link = self.redis_store._link = ToldLink(url, prefix=prefix, clock=clock)

    def flush(self) -> None:
        super().flush()
        self.link.forget()
