"""A fleet in one thread, turned by hand: the real scheduler over the memory store, nodes that hold mock sandboxes and
start blank ones ahead, and threads that come, wait, work and leave. What happens depends on a seed alone."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import filterfalse
from pathlib import Path
from typing import Any

from sandfleet.client import Client
from sandfleet.config import Settings
from sandfleet.ids import Identity
from sandfleet.model import SandboxSpec, SandboxState
from sandfleet.store.base import NodeRecord, Push, Reserved, Route, Waiter
from sandfleet.store.memory import MemoryStore
from sandfleet.store.memory_steps import is_blank
from sandfleet.testing import ManualClock
from sandfleet.testing.backend import MockBackend, MockConnection
from sandfleet.wire import SCHEDULER_QUEUE, OpMessage, celery_message, node_queue
from sandfleet_scheduler.service import Scheduler
from sandfleet_scheduler.serving import LineServer

TICK_S = 0.1
LONG_S = 1e6
CLIENT = "c"
_START_WITHIN_TICKS = 8


def spec_of(kind: str) -> SandboxSpec:
    return SandboxSpec("mock", env={"KIND": kind})


@dataclass(eq=False)
class Member:
    """A thread of conversation: it comes, waits for its sandbox, stays in it for a while and leaves.

    Attributes:
        comes_at, stays, patience: In ticks; None: it waits for as long as it takes.
        made_before, made_by_then: How many sandboxes had been made when it began to wait, and when it got its own.
        kind: Of sandbox that it wants.
    """

    identity: Identity
    comes_at: int
    stays: int
    patience: int | None = None
    comes_again: bool = False
    state: str = "away"
    route: Route | None = None
    until: int = 0
    asked: int = 0
    answers: list[str] = field(default_factory=list)
    made_before: int = 0
    made_by_then: int = 0
    was_parked: bool = False
    kind: str = "a"

    @property
    def agent(self) -> str:
        return f"agent-{self.identity.digest[:16]}"


class MockNode:
    """Takes the messages of its queue, and does with mock sandboxes what they say: some at once, some ticks later.

    Args:
        kinds: Those of which it keeps a blank sandbox ready; a kind may be named more than once.
        idle_s: Warm sandboxes end after so long; None: never.
    """

    def __init__(
        self, store: MemoryStore, node_id: str, replicas: int, kinds: tuple[str, ...], idle_s: float | None
    ) -> None:
        self.kinds, self.idle_s, self.incarnation = kinds, idle_s, f"{node_id}-1"
        #: Blank sandboxes that run, with their kind; those that are not ready yet, with the tick at which they will be.
        self.blanks: dict[str, str] = {}
        self.starting: dict[str, int] = {}
        self._due: list[tuple[int, OpMessage]] = []
        self.store, self.node_id, self.replicas = store, node_id, replicas
        self.backend = MockBackend(factory=lambda plan: MockConnection(plan.sandbox_id))
        store.announce(NodeRecord(node_id, self.incarnation, replicas, "data", ("mock",)), lease_s=LONG_S)

    def work(self, now: int, dice: random.Random) -> Counter[str]:
        done: Counter[str] = Counter()
        queue = self.store.queues[node_queue(self.node_id)]
        while queue:
            message = OpMessage.from_wire(argument_of(queue.pop())[1])
            self._due.append((now + dice.randrange(4), message))
        due = [message for tick, message in self._due if tick <= now]
        self._due = [(tick, message) for tick, message in self._due if tick > now]
        for message in due:
            if self.store.claim(message.op_id, message.route).status != "claimed":
                continue
            sandbox_id = message.route.sandbox_id
            if message.kind == "node.create":
                assert sandbox_id not in self.backend.running(), "made twice"
                done += self._give_blank(message)
                self._start(sandbox_id)
                if not self.store.created(message.route):
                    self.backend.destroy(sandbox_id)
                done["created"] += 1
            else:
                self.backend.destroy(sandbox_id)
                assert self.store.stopped(message.route)
                done["removed"] += 1
            self.store.finish(message.op_id, message.route, outcome="ok", reply="{}")
        done += self._reap()
        self._finish_starts(now)
        self._refill(now, dice)
        return done

    @property
    def promised(self) -> set[str]:
        """Blank sandboxes whose place a thread has taken over, and whose message is not handled yet."""
        return {str(message.args["blank"]) for _, message in self._due if "blank" in message.args}

    def _start(self, sandbox_id: str) -> None:
        self.backend._connections[sandbox_id] = MockConnection(sandbox_id)

    def _reap(self) -> Counter[str]:
        ended: Counter[str] = Counter()
        if self.idle_s is None:
            return ended
        until = self.store.now_ms() - int(self.idle_s * 1000)
        for one in self.store.sweep(self.node_id, self.incarnation):
            stop = self.store.begin_stop(
                one.sandbox_id, owner=None, force=False, reason="idle", if_warm_before_ms=until
            )
            if stop.status == "recorded" and stop.route is not None:
                self.backend.destroy(one.sandbox_id)
                assert self.store.stopped(stop.route)
                ended["reaped"] += 1
        return ended

    def _give_blank(self, message: OpMessage) -> Counter[str]:
        """A node renames a blank sandbox of the right kind, and removes another; here both are an end and a start."""
        slot = message.args.get("blank")
        if slot is None:
            return Counter(cold=1)
        kind = self.blanks.pop(slot)
        assert slot not in self.starting, "it was not ready"
        self.backend.destroy(slot)
        wanted = SandboxSpec.from_wire(message.args["spec"])
        return Counter(claimed=1) if wanted == spec_of(kind) else Counter(given_up=1)

    def _finish_starts(self, now: int) -> None:
        for slot in [slot for slot, tick in self.starting.items() if tick <= now]:
            del self.starting[slot]
            digest = spec_of(self.blanks[slot]).digest
            if not self.store.blank_ready(self.node_id, self.incarnation, slot, spec_digest=digest):
                self._remove(slot)

    def _refill(self, now: int, dice: random.Random) -> None:
        missing = Counter(self.kinds) - Counter(self.blanks.values())
        for kind in sorted(missing.elements()):
            slot = f"{dice.getrandbits(64):016x}"
            expires_s = _START_WITHIN_TICKS * TICK_S
            if not self.store.begin_blank(self.node_id, self.incarnation, slot, expires_s=expires_s, reserve_free=1):
                return
            self.blanks[slot] = kind
            # One in ten takes too long.
            self.starting[slot] = now + (dice.randrange(1, 6) if dice.random() < 0.9 else 2 * _START_WITHIN_TICKS)
            self._start(slot)

    def _remove(self, slot: str) -> None:
        del self.blanks[slot]
        self.backend.destroy(slot)
        self.store.blank_gone(self.node_id, self.incarnation, slot)


def argument_of(message: str) -> tuple[str, dict[str, Any]]:
    """Task name and argument of a Celery message."""
    envelope = json.loads(message)
    return str(envelope["headers"]["task"]), json.loads(envelope["body"])[0][0]


class Fleet:
    """Everything, and one tick of it."""

    def __init__(
        self,
        *,
        nodes: int,
        replicas: int,
        seed: int,
        lossy: bool = False,
        kinds: tuple[str, ...] = (),
        idle_s: float | None = None,
        **settings: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.store = MemoryStore(now_ms=lambda: int(self.clock.now() * 1000))
        self.client = Client(Settings.load({}, backend="mock", data_root=Path("/nowhere"), **settings), self.store)
        self.client.learn_clock(self.store.now_ms())
        self.scheduler = Scheduler(self.client)
        self.line = LineServer(self.scheduler)
        self.nodes = [MockNode(self.store, f"n{number}", replicas, kinds, idle_s) for number in range(nodes)]
        self.places = nodes * replicas
        self.lossy = lossy
        self.members: list[Member] = []
        self.by_op: dict[str, Member] = {}
        self.coming: deque[Member] = deque()
        self.inside: set[Member] = set()
        self.waiting: set[Member] = set()
        self.done: Counter[str] = Counter()
        self.made: list[str] = []
        #: (user, turn) of those who got a place from the line, in that order.
        self.given: list[tuple[str, int]] = []
        self.blanks_given: set[str] = set()
        #: For how many ticks somebody has stood in line beside a blank sandbox that is ready, and was so at most.
        self.kept_from_line = self.longest_kept = 0
        self._reserve, self.store.reserve = self.store.reserve, self._reserve_and_note  # type: ignore[method-assign]
        self.cursor = "0"
        self.now = 0
        self.store.open_replies(CLIENT, ttl_s=LONG_S)

    def invite(self, members: list[Member]) -> None:
        self.members = members
        self.coming = deque(sorted(members, key=lambda member: member.comes_at))

    @property
    def is_over(self) -> bool:
        return not (self.coming or self.inside or self.waiting)

    def tick(self) -> None:
        """Who is due comes, gives up or leaves; then every message is handled."""
        while self.coming and self.coming[0].comes_at <= self.now:
            self._ask(self.coming.popleft())
        for member in sorted(self.waiting, key=lambda member: member.identity.thread_id):
            self._wait(member)
        for member in sorted(self.inside, key=lambda member: member.identity.thread_id):
            if member.until <= self.now:
                self._leave(member)
        self._schedule()
        for node in self.nodes:
            self.done += node.work(self.now, self.random)
        self._hear()
        if self.now % 10 == 9:
            self.line.serve_if_due()
        idle = self.store.line_length() and any(self.store.blanks(node.node_id) for node in self.nodes)
        self.kept_from_line = self.kept_from_line + 1 if idle else 0
        self.longest_kept = max(self.longest_kept, self.kept_from_line)
        self.clock.advance(TICK_S)
        self.client.learn_clock(self.store.now_ms())
        self.now += 1

    # --- the threads -------------------------------------------------------------------------

    def _ask(self, member: Member) -> None:
        if not member.asked:
            member.made_before = self.done["created"]
            member.until = self.now + member.patience if member.patience is not None else 0
        member.state, member.asked = "waiting", self.now + 1
        op_id = f"op-{member.identity.digest}"
        self.by_op[op_id] = member
        user_id, thread_id = member.identity.user_id, member.identity.thread_id
        request = {"v": 1, "owner": [user_id, thread_id], "overflow": "wait"}
        request["spec"] = spec_of(member.kind).to_wire()
        push = Push(SCHEDULER_QUEUE, celery_message("scheduler.acquire", op_id, request, queue="q", describe=""))
        waiter = Waiter(op_id, CLIENT, member.agent, LONG_S)
        found = self.store.acquire(member.identity, waiter, wait_s=LONG_S, push=push)
        member.was_parked |= found.status == "parked"
        self.waiting.add(member)
        if found.route is not None:
            self._enter(member, found.route)

    def _wait(self, member: Member) -> None:
        if member.patience is not None and member.until <= self.now:
            self.store.withdraw(member.identity, f"op-{member.identity.digest}")
            self.waiting.remove(member)
            member.state = "gave up"
        elif self.now - member.asked >= 20:
            self._ask(member)

    def _enter(self, member: Member, route: Route) -> None:
        member.state, member.route, member.until = "inside", route, self.now + member.stays
        member.made_by_then = self.done["created"]
        self.waiting.discard(member)
        self.inside.add(member)

    def _leave(self, member: Member) -> None:
        assert member.route is not None
        assert self.store.release(member.route.sandbox_id, member.identity.digest, member.agent)
        self.inside.remove(member)
        member.state, member.asked = "served", 0
        if member.comes_again:
            member.comes_again, member.comes_at = False, self.now + 5
            self.coming.append(member)
            self.coming = deque(sorted(self.coming, key=lambda one: one.comes_at))

    def _hear(self) -> None:
        while page := self.store.read_replies(CLIENT, self.cursor, block_s=0):
            self.cursor = page[-1].cursor
            for reply in page:
                if reply.op_id not in self.by_op:
                    continue
                member, payload = self.by_op[reply.op_id], json.loads(reply.payload)
                assert "ok" in payload, payload
                member.answers.append("ok")
                if payload["ok"]["new"]:
                    self.made.append(member.identity.thread_id)
                if member.state == "waiting":
                    ok = payload["ok"]
                    self._enter(member, Route(ok["sandbox_id"], ok["node_id"], ok["incarnation"], ok["epoch"]))
                else:
                    self.store.release(payload["ok"]["sandbox_id"], member.identity.digest, member.agent)
            self.store.trim_replies(CLIENT, self.cursor)

    def _reserve_and_note(self, identity: Identity, *args: Any, **options: Any) -> Reserved:
        stands = self.store._in_line.get(identity.digest)
        told = self._reserve(identity, *args, **options)
        assert told.blank not in self.blanks_given, "a blank sandbox was given twice"
        self.blanks_given |= {told.blank} - {""}
        if told.status == "reserved" and stands is not None:
            self.given.append((stands.user, stands.stands[0]))
        return told

    # --- the schedulers ----------------------------------------------------------------------

    def _schedule(self) -> None:
        queue = self.store.queues[SCHEDULER_QUEUE]
        while queue:
            task, argument = argument_of(queue.pop())
            if self.lossy and self.random.random() < 0.2:
                continue  # the scheduler that had it died
            if task == "scheduler.acquire":
                self.scheduler.acquire(argument)
            else:
                assert task == "scheduler.serve"
                self.line.serve()

    # --- what must hold after every tick -----------------------------------------------------

    def check(self) -> None:
        store = self.store
        of_user: Counter[str] = Counter()
        seen: set[str] = set()
        for node in self.nodes:
            places = store._places[node.node_id]
            assert len(places) <= node.replicas
            assert not seen & set(places), "counted twice"
            seen |= set(places)
            blanks = {member[1:] for member in places if is_blank(member)}
            assert set(store.blanks(node.node_id)) <= blanks <= set(node.blanks), "a place for what does not run"
            late = {slot for slot in node.starting if store._place_until(node.node_id, f"~{slot}") <= store.now_ms()}
            for slot in set(node.blanks) - late:
                assert (slot in blanks) + (slot in node.promised) == 1, "runs without a place"
            running = set(node.backend.running()) - late
            assert running - set(node.blanks) <= set(places), "runs without a place"
            assert len(running) <= node.replicas, "more run than there are places"
            for sandbox_id in filterfalse(is_blank, places):
                sandbox = store._sandboxes.get(sandbox_id)
                assert sandbox is not None, "a place that nobody gives back"
                assert sandbox.route.node_id == node.node_id
                assert sandbox.state != SandboxState.LOST
                if sandbox.state == SandboxState.LIVE:
                    assert sandbox_id in node.backend.running()
                if sandbox.user_id is not None:
                    of_user[sandbox.user_id] += 1
        assert {user: len(held) for user, held in store._users.items() if held} == dict(of_user)
        assert len(store._order) == len(store._in_line)
        for digest in store._in_line:
            assert store._awaited(digest)
            assert store._thread_state(digest)[0] is None
        for member in self.inside:
            assert member.route is not None
            assert member.route.sandbox_id in seen, "its sandbox was ended under it"
