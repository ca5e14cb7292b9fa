"""Promises about a Redis whose clock is set while a fleet works: leases and deadlines are told by it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from sandfleet import CommandResult
from sandfleet.errors import QueueTimeout, SandfleetError
from tests.chaos.fleet import LEASE_S, Fleet, unique
from tests.chaos.load import Load
from tests.services import RedisServer, require, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

# Adds the seconds in a file to the wall clock of one process; the other clocks stay.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <fcntl.h>
#include <time.h>
static volatile long *by;
__attribute__((constructor)) static void begin(void) {
  int fd = open(getenv("CLOCK_SET_BY"), O_RDONLY);
  by = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
}
static int (*real_gettime)(clockid_t, struct timespec *);
int clock_gettime(clockid_t id, struct timespec *ts) {
  if (!real_gettime) real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  int done = real_gettime(id, ts);
  if (done == 0 && id == CLOCK_REALTIME && by) ts->tv_sec += *by;
  return done;
}
int gettimeofday(struct timeval *tv, void *tz) {
  struct timespec ts;
  (void)tz;
  clock_gettime(CLOCK_REALTIME, &ts);
  tv->tv_sec = ts.tv_sec;
  tv->tv_usec = ts.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *told) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  if (told) *told = ts.tv_sec;
  return ts.tv_sec;
}
"""


class SetRedis(RedisServer):
    """A Redis whose clock the test sets."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        directory.mkdir(parents=True)
        self._by = directory / "by"
        self._shim = directory / "shim.so"
        self.set(0)
        source = directory / "shim.c"
        source.write_text(SHIM)
        compiler = shutil.which("cc") or pytest.skip("cc is missing: install a C compiler")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(self._shim), str(source), "-ldl"], check=True)

    def set(self, by_s: int) -> None:
        """Set the clock so far from the machine's, at once."""
        with self._by.open("r+b" if self._by.exists() else "w+b") as file:
            file.write(by_s.to_bytes(8, "little", signed=True))

    def _command(self) -> list[str]:
        environment = [f"LD_PRELOAD={self._shim}", f"CLOCK_SET_BY={self._by}"]
        return [shutil.which("env") or "env", *environment, *super()._command()]


@pytest.fixture(scope="module")
def clocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, SetRedis]]:
    require("redis")
    require("bwrap")
    directory = tmp_path_factory.mktemp("clocked")
    server = SetRedis(directory / "redis")
    server.start()
    running = Fleet(directory / "fleet", server.url)
    try:
        running.start_scheduler()
        running.nodes("c1", "c2")
        yield running, server
    finally:
        running.close()
        server.stop()


@pytest.mark.parametrize("jump_s", [-45, 45, 7200, -7200], ids=lambda by: f"{by:+} s")
def test_a_clock_that_is_set_under_load_costs_no_node_and_no_sandbox_and_nothing_runs_twice(
    clocked: tuple[Fleet, SetRedis], jump_s: int
) -> None:
    fleet, server = clocked
    with redis.Redis.from_url(server.url) as client:
        started_at = client.time()[0]
    nodes = {view.node_id: view.incarnation for view in fleet.store.nodes() if view.alive}
    assert len(nodes) == 2
    with fleet.provider(label="") as provider:
        held = provider.get(provider.acquire(unique("held")))
        assert held is not None
        assert held.run("sleep 1000 & echo $! > pid").ok
        loads = [Load(fleet, unique("load")) for _ in range(2)]

        def told() -> str:
            return "\n".join([fleet.story(), *(repr(list(load.answers.items())[-3:]) for load in loads)])

        try:
            wait_until(lambda: all(load.good >= 5 for load in loads), 40, story=told)
            owners = {info.sandbox_id: (info.incarnation, info.epoch) for info in fleet.store.sandboxes()}
            server.set(jump_s)
            with redis.Redis.from_url(server.url) as client:
                assert abs(client.time()[0] - started_at - jump_s) < 60
            reached = [load.good for load in loads]
            wait_until(lambda: all(n.good >= m + 5 for n, m in zip(loads, reached, strict=True)), 60, story=told)
            # Long enough for whoever takes silence for death, and for who looks for what is idle.
            renewed = fleet.store.now_ms()
            wait_until(lambda: fleet.store.now_ms() > renewed + (2 * LEASE_S + 1) * 1000, 20, story=told)
            assert {view.node_id: view.incarnation for view in fleet.store.nodes() if view.alive} == nodes, told()
            now = {info.sandbox_id: (info.incarnation, info.epoch) for info in fleet.store.sandboxes()}
            assert owners.items() <= now.items(), told()
            try:
                assert held.run("kill -0 $(cat pid)").ok, "what ran in it runs"
            except QueueTimeout:  # this client heard of the clock only now: its deadline had passed
                assert held.run("kill -0 $(cat pid)").ok, "what ran in it runs"
        finally:
            server.set(0)
            for load in loads:
                load.join()
        for load in loads:
            load.judge()
        bad = {n: a for load in loads for n, a in load.answers.items() if not isinstance(a, CommandResult)}
        assert all(isinstance(answer, SandfleetError) for answer in bad.values())
    wait_until(lambda: sum(view.alive for view in fleet.store.nodes()) == 2, 10, story=told)
