"""What may go wrong, one method each. All of them return at once; what is to be undone later is put in a plan."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable

import psutil
import redis

from tests.chaos.torture.world import LEASE_S, Role, World

__all__ = ["Faults"]


class Faults:
    """Picks faults by weight and carries them out; `count` tells how many of each there were."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.count: Counter[str] = Counter()
        self._plan: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._quiet_until = 0.0
        self._weights: dict[Callable[[], bool], int] = {
            self.node_killed: 14,
            self.node_told_to_end: 8,
            self.node_frozen_past_its_lease: 8,
            self.node_frozen_for_a_moment: 6,
            self.machine_gone: 4,
            self.scheduler_killed: 6,
            self.scheduler_frozen: 3,
            self.client_killed: 5,
            self.redis_killed: 3,
            self.redis_restarted: 3,
            self.redis_emptied: 1,
            self.connections_cut: 8,
            self.sandbox_killed: 12,
            self.message_delivered_again: 12,
            self.message_of_long_ago: 8,
        }
        if only := world.options.faults:
            self._weights = {getattr(self, name): 1 for name in only}

    def turn(self) -> None:
        """Do what is due, and sometimes something new."""
        now = time.monotonic()
        while self._plan and self._plan[0][0] <= now:
            heapq.heappop(self._plan)[2]()
        if now < self._quiet_until or self.world.redis_down:
            return
        (fault,) = self.rng.choices(list(self._weights), list(self._weights.values()))
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError, psutil.Error, subprocess.SubprocessError):
            self._log(f"{fault.__name__} begins")
            if fault():
                self.count[fault.__name__] += 1
                self._log(f"{fault.__name__} done")
        self._quiet_until = time.monotonic() + self.rng.uniform(0.3, 3.0)

    def _log(self, what: str) -> None:
        with (self.world.directory / "logs" / "faults.log").open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S', time.gmtime())} {time.monotonic():.2f} {what}\n")

    def settle(self) -> None:
        """Undo at once what was to be undone later."""
        while self._plan:
            heapq.heappop(self._plan)[2]()

    def _later(self, after_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._plan, (time.monotonic() + after_s, next(self._numbers), act))

    # --- processes -----------------------------------------------------------------------------

    def node_killed(self) -> bool:
        return self._kill(self._pick(self.world.nodes, keep=1), self.rng.choice((0.0, 0.5, LEASE_S * 1.5)))

    def node_told_to_end(self) -> bool:
        role = self._pick(self.world.nodes, keep=1)
        if role is None or role.process is None:
            return False
        # When it has ended, the supervisor starts it again.
        role.again_at = time.monotonic() + self.rng.choice((0.1, 1.0, LEASE_S * 1.5))
        role.process.send(signal.SIGTERM)
        return True

    def node_frozen_past_its_lease(self) -> bool:
        return self._freeze(self._pick(self.world.nodes, keep=1), LEASE_S * self.rng.uniform(1.2, 2.5))

    def node_frozen_for_a_moment(self) -> bool:
        return self._freeze(self._pick(self.world.nodes, keep=1), LEASE_S * self.rng.uniform(0.1, 0.7))

    def machine_gone(self) -> bool:
        machine = self.rng.choice("ab")
        others = [role for role in self.world.nodes.values() if role.name[0] != machine]
        if not any(role.running and not role.stopped for role in others):
            return False
        down_s = LEASE_S * self.rng.uniform(1.5, 4)  # others go on from a checkpoint meanwhile, where they may
        killed = [self._kill(role, down_s) for role in self.world.nodes.values() if role.name[0] == machine]
        return any(killed)

    def scheduler_killed(self) -> bool:
        return self._kill(self._pick(self.world.schedulers), self.rng.uniform(0, 4))

    def scheduler_frozen(self) -> bool:
        return self._freeze(self._pick(self.world.schedulers), self.rng.uniform(1, 8))

    def client_killed(self) -> bool:
        role = self._pick(self.world.clients)
        if role is None:
            return False
        self.world.killed_runs.append(self.world.run_of(role))
        return self._kill(role, self.rng.uniform(0, 2))

    def _pick(self, roles: dict[str, Role], keep: int = 0) -> Role | None:
        up = [role for role in roles.values() if role.running and not role.stopped and not role.again_at]
        return self.rng.choice(up) if len(up) > keep else None

    def _kill(self, role: Role | None, down_s: float) -> bool:
        if role is None or role.process is None or not role.running:
            return False
        role.again_at = time.monotonic() + down_s
        role.process.kill()
        return True

    def _freeze(self, role: Role | None, for_s: float) -> bool:
        if role is None or role.process is None:
            return False
        process = role.process
        process.send(signal.SIGSTOP)
        role.stopped = True

        def wake_up() -> None:
            if role.process is process and process.running:
                process.send(signal.SIGCONT)
                role.stopped = False

        self._later(for_s, wake_up)
        return True

    # --- Redis ---------------------------------------------------------------------------------

    def redis_killed(self) -> bool:
        self.world.redis.kill()
        return self._redis_back()

    def redis_restarted(self) -> bool:
        self.world.redis.stop()
        return self._redis_back()

    def _redis_back(self) -> bool:
        self.world.redis_down = True

        def come_back() -> None:
            if self.world.redis_down:
                self.world.redis.start()
                self.world.redis_down = False

        self._later(self.rng.uniform(0, 4), come_back)
        return True

    def redis_emptied(self) -> bool:
        self.world.flushes += 1
        with self.world.broker() as broker:
            broker.flushall()
        return True

    def connections_cut(self) -> bool:
        with self.world.broker() as broker:
            listed = [each["id"] for each in broker.client_list() if each["name"] != "torture"]
            for each in self.rng.sample(listed, min(len(listed), self.rng.choice((1, 3, 30)))):
                broker.client_kill_filter(_id=each)
        return True

    # --- sandboxes and messages ----------------------------------------------------------------

    def sandbox_killed(self) -> bool:
        if self.world.options.backend == "docker":
            running = self.world.containers(running=True)
            if running:
                subprocess.run(["docker", "kill", self.rng.choice(running)], capture_output=True, timeout=5)
            return bool(running)
        role = self._pick(self.world.nodes)
        children = psutil.Process(role.process.pid).children() if role and role.process else []
        if children:
            self.rng.choice(children).kill()
        return bool(children)

    def message_delivered_again(self) -> bool:
        return self._deliver(slice(-6, None), times=2)

    def message_of_long_ago(self) -> bool:
        return self._deliver(slice(0, -6), times=1)

    def _deliver(self, which: slice, times: int) -> bool:
        kept = list(self.world.directory.glob("*.messages"))
        if not kept:
            return False
        # The last line may be under way.
        lines = self.rng.choice(kept).read_text().splitlines()[:-1][which]
        with self.world.broker() as broker:
            for line in self.rng.sample(lines, min(len(lines), 4)):
                queue, message = json.loads(line)
                for _ in range(times):
                    broker.lpush(queue, message)
        return bool(lines)
