"""Both stores driven in lockstep through lives that nobody would think of.

Each rule does the same to a `MemoryStore` and to Redis, on one clock, and compares what they say; after each step
both must show the same fleet, and the promises of the design must hold in it: a thread has one sandbox, places never
exceed the replicas (but by what was adopted or is a burst), a blank sandbox is given once, a user is counted for the
places taken and no more than allowed, whoever stands in line is waited for and has nothing, nobody overtakes the line,
nothing in use is reaped, an epoch never goes back, every operation is answered once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from sandfleet.errors import SandfleetError
from sandfleet.ids import Identity
from sandfleet.model import NodeState, SandboxState
from sandfleet.store.base import Push, Reserved, Route, Waiter
from tests.contract.store_blank_rules import DIGESTS, NODES
from tests.contract.store_clock import Clock, ToldRedisWorld
from tests.contract.store_compared import difference, fleet, renamed
from tests.contract.store_fixtures import ERROR, LONG_S, SPEC, MemoryWorld, World
from tests.contract.store_job_rules import JobRules

REPLICAS = 2
BURST = 1
USER = "u"
EXPECT = ("live", "live", "live", "creating", "stopping")
TROUBLE = ("lapse", "retire", "drain", "flush", "recovered", "cordoned", "draining", "stale", "impatience", "later")
#: What ends after a while: a repeated request, a stop that makes room, an adopted sandbox that is taken to be in use.
WINDOWS_MS = (2000, 30_000, 60_000)
#: What was lost is forgotten after ten minutes of the server's own clock.
MOST_MS = 480_000
THREADS = (Identity("thread-0"), *(Identity(f"thread-{i}", USER) for i in (1, 2, 3)))
AGENTS = ("x", "y")

nodes = st.sampled_from(NODES)
threads = st.sampled_from(THREADS)
agents = st.sampled_from(AGENTS)
flags = st.booleans()
digests = st.sampled_from(DIGESTS)
back = st.integers(0, 2)  # how far back in a thread's routes or the operations to reach

_turn = itertools.count()
Pair = tuple[Route, Route]


class TwoStores(JobRules):
    """The machine; `url` is set by the test that runs it."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.memory = MemoryWorld(now_ms=self.clock)
        self.redis = ToldRedisWorld(self.url, f"m{next(_turn)}:", self.clock)
        self.redis.flush()
        self.worlds: tuple[World, World] = (self.memory, self.redis)
        self.incarnations = dict.fromkeys(NODES, 0)
        self.routes: dict[Identity, list[Pair]] = {identity: [] for identity in THREADS}
        self.epochs: dict[tuple[int, Identity], int] = {}
        self.ops: list[tuple[str, Identity, Pair]] = []
        self.told_again: set[str] = set()  # by their nodes: nobody waits for an answer
        self.counter = itertools.count()
        self.overbooked: set[str] = set()
        self.waiters: list[tuple[Identity, str]] = []
        #: Threads that were parked while their old sandbox was out of reach; it may have come back since.
        self.revenants: set[Identity] = set()

    def teardown(self) -> None:
        self.redis.flush()
        for world in self.worlds:
            world.close()

    # --- doing one thing twice ----------------------------------------------------------------

    def both(self, act: Callable[[World, int], Any]) -> Any:
        """The same on either store at one time, with the same outcome; the two answers."""
        self.clock.pass_ms(1)  # so that an epoch is never one from before a flush
        answers = []
        for side, world in enumerate(self.worlds):
            try:
                answers.append(act(world, side))
            except SandfleetError as exc:
                answers.append(exc.code)
        assert answers[0] == answers[1], difference(*answers)
        return answers

    def incarnation(self, node: str) -> str:
        return f"i{self.incarnations[node]}"

    def pair(self, identity: Identity, ago: int) -> Pair | None:
        known = self.routes[identity]
        return known[-1 - ago % len(known)] if known else None

    # --- nodes --------------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        for node in NODES:
            self.announce(node, new=False)
        self.both(lambda w, _: w.listen())

    def announce(self, node: str, *, new: bool, again: bool = False) -> None:
        if new:
            self.incarnations[node] += 1
        name = self.incarnation(node)
        answers = self.both(lambda w, _: w.announce(node, name, replicas=REPLICAS, burst_limit=BURST, again=again) > 0)
        if new and answers[0] is not True:
            self.incarnations[node] -= 1

    def close(self, node: str, limit: int, *, retire: bool) -> None:
        name = None if retire else self.incarnation(node)
        self.both(lambda w, _: w.store.close_incarnation(node, name, reason="closed", limit=limit))

    @rule(node=nodes, limit=st.integers(1, 3), trouble=st.sampled_from(TROUBLE))
    def disturb(self, node: str, limit: int, trouble: str) -> None:
        """Trouble is one rule, so that lives are long enough to have any."""
        if trouble == "lapse":
            self.both(lambda w, _: w.lapse_lease(node))
        elif trouble == "retire":
            self.close(node, limit, retire=True)
        elif trouble == "drain":
            self.both(lambda w, _: w.store.drain_inflight(node, self.incarnation(node), limit=limit))
        elif trouble == "flush" and any(self.routes.values()):
            self.both(lambda w, _: w.flush())
            self.both(lambda w, _: w.listen())
            self.ops.clear()
            for name in NODES:
                self.announce(name, new=False, again=limit > 1)
        elif trouble == "recovered":
            self.both(lambda w, _: w.end_recovery())
        elif trouble == "later" and self.clock.ms - self.clock.began_ms < MOST_MS:
            self.clock.pass_ms(WINDOWS_MS[limit - 1])
        elif trouble == "impatience":
            self.lose_patience(limit)
        elif trouble == "stale":
            self.both(lambda w, _: w.store.set_node_state(node, NodeState.GONE, incarnation="another"))
        elif trouble not in ("flush", "later"):
            self.both(lambda w, _: w.store.set_node_state(node, NodeState(trouble)))

    def lose_patience(self, count: int) -> None:
        for identity in [identity for identity, _ in self.waiters if self.memory.waiting(identity)][:count]:
            self.both(lambda w, _, whose=identity: w.expire_waiters(whose))

    @rule(node=nodes, limit=st.integers(1, 3), restart=st.booleans())
    def recover(self, node: str, limit: int, restart: bool) -> None:
        """A node renews its lease, or comes back as a new incarnation and closes what it left."""
        name = self.incarnation(node)
        self.both(lambda w, _: (r := w.store.renew(node, name, lease_s=LONG_S)).known and r.state)
        if restart:
            self.both(lambda w, _: w.lapse_lease(node))
        self.announce(node, new=restart)
        self.close(node, limit, retire=False)
        self.both(lambda w, _: w.store.set_node_state(node, NodeState.READY))

    @rule(node=nodes)
    def sweep(self, node: str) -> None:
        self.both(lambda w, _: w.store.sweep(node, self.incarnation(node)))

    # --- sandboxes ----------------------------------------------------------------------------

    @rule(identity=threads, agent=agents, client=st.sampled_from(["c1", "gone"]))
    def acquire(self, identity: Identity, agent: str, client: str) -> None:
        waiter = Waiter(f"a{next(self.counter)}", client, agent, LONG_S)
        self.waiters.append((identity, waiter.op_id))
        self.both(lambda w, _: w.store.acquire(identity, waiter, wait_s=LONG_S, push=None))

    @rule(identity=threads, node=nodes, most=st.integers(0, 2), burst=flags, from_line=flags, digest=digests)
    def reserve(self, identity: Identity, node: str, most: int, burst: bool, from_line: bool, digest: str) -> None:
        line, before = [parked.digest for parked in self.memory.store.parked()], self.memory.places(node)
        ready = self.memory.store.blanks(node)
        options = {"max_per_user": most, "burst": burst, "from_line": from_line, "spec_digest": digest}
        answers = self.both(lambda w, _: w.reserve(identity, node, self.incarnation(node), **options))
        first, second = answers
        assert isinstance(first, Reserved)
        for world, refused in zip(self.worlds, answers, strict=True):
            evict = refused.evict and world.store.sandbox(refused.evict)
            assert not evict or (evict.state, evict.user_id) == (SandboxState.WARM, USER)
        if first.status == "reserved":
            self.routes[identity].append((first.route, second.route))
            self.given_once(node, first.blank, ready, digest)
            if burst and not first.blank and self.memory.places(node) > REPLICAS:
                self.overbooked.add(node)
            else:
                assert identity.digest in line or not line, "it overtook those who stand in line"
            assert self.memory.places(node) <= (before if first.blank else REPLICAS + BURST * burst)
            assert not most or identity.user_id is None or len(self.memory.counted_for(USER)) <= self.allowed(most)
            for side, reserved in enumerate(answers):
                assert reserved.route.epoch > self.epochs.get((side, identity), 0)
                self.epochs[side, identity] = reserved.route.epoch

    def allowed(self, most: int) -> int:
        """Expired reservations that nobody swept away yet do not count."""
        infos = [self.memory.store.sandbox(sandbox_id) for sandbox_id in self.memory.counted_for(USER)]
        now = self.memory.store.now_ms()
        expired = [i for i in infos if i and self.memory.memory._place_until(i.node_id, i.sandbox_id) <= now]
        return most + len(expired)

    @rule(identity=threads)
    def park(self, identity: Identity) -> None:
        push = Push("scheduler", "serve")
        old = self.memory.store.sandbox(identity.digest[:8])
        answers = self.both(lambda w, _: w.store.park(identity, f"request {identity.thread_id}", push=push))
        if answers[0] and old is not None:
            self.revenants.add(identity)

    @precondition(lambda self: self.waiters)
    @rule(ago=back)
    def withdraw(self, ago: int) -> None:
        identity, op_id = self.waiters[-1 - ago % len(self.waiters)]
        position = [parked.digest for parked in self.memory.store.parked()]
        before = position.index(identity.digest) + 1 if identity.digest in position else 0
        answers = self.both(lambda w, _: w.store.withdraw(identity, op_id))
        assert answers[0] == before

    @rule(node=nodes, most=st.integers(0, 2))
    def serve(self, node: str, most: int) -> None:
        """What a scheduler does, as far as the store goes: the first in line gets a place, or stays there."""
        self.both(lambda w, _: w.store.serve_line())
        line = self.memory.store.parked(limit=1)
        for parked in line:
            identity = next(identity for identity in THREADS if identity.digest == parked.digest)
            self.reserve(identity, node, most, burst=False, from_line=True, digest=DIGESTS[1])

    @rule(identity=threads, ago=back)
    def created(self, identity: Identity, ago: int) -> None:
        if pair := self.pair(identity, ago):
            self.both(lambda w, side: w.store.created(pair[side]))

    @rule(identity=threads, node=nodes, agent=agents, count=st.integers(0, 2))
    def live_with_operations(self, identity: Identity, node: str, agent: str, count: int) -> None:
        """Most of what matters happens to a sandbox that somebody uses."""
        self.reserve(identity, node, 0, burst=False, from_line=False, digest=DIGESTS[0])
        self.created(identity, 0)
        self.acquire(identity, agent, "c1")
        for _ in range(count):
            self.record(identity, 0, "live")

    @rule(identity=threads, ago=back)
    def create_failed(self, identity: Identity, ago: int) -> None:
        if pair := self.pair(identity, ago):
            self.both(lambda w, side: w.store.create_failed(pair[side], ERROR))

    @rule(identity=threads)
    def reservation_expires(self, identity: Identity) -> None:
        def act(world: World, side: int) -> None:
            info = world.store.sandbox(identity.digest[:8])
            if info is not None and info.state == SandboxState.CREATING:
                world.expire_place(info.sandbox_id, info.node_id)

        self.both(act)

    @rule(identity=threads)
    def answer_waiters(self, identity: Identity) -> None:
        self.both(lambda w, _: w.store.answer_waiters(identity, ERROR))

    @rule(identity=threads, agent=agents)
    def release(self, identity: Identity, agent: str) -> None:
        self.both(lambda w, _: w.store.release(identity.digest[:8], identity.digest, agent))

    @rule(identity=threads, owner=threads, agent=agents)
    def renew_agent(self, identity: Identity, owner: Identity, agent: str) -> None:
        self.both(lambda w, _: w.store.renew_agents(agent, {identity.digest[:8]: owner.digest}, ttl_s=LONG_S))

    @rule(identity=threads, force=st.booleans(), only_warm=st.booleans())
    def begin_stop(self, identity: Identity, force: bool, only_warm: bool) -> None:
        def act(world: World, _: int) -> str:
            sandbox_id = identity.digest[:8]
            before = world.store.sandbox(sandbox_id)
            until = world.store.now_ms() + 60_000 if only_warm else None
            status = world.store.begin_stop(
                sandbox_id, owner=None, force=force, reason="test", if_warm_before_ms=until
            ).status
            if status == "recorded" and not force:
                assert before is not None
                assert before.agents == before.ops == 0, "somebody was in it"
            return status

        self.both(act)

    @rule(identity=threads, ago=back)
    def stopped(self, identity: Identity, ago: int) -> None:
        if pair := self.pair(identity, ago):
            self.both(lambda w, side: w.store.stopped(pair[side]))

    @rule(identity=threads, ago=back)
    def lost(self, identity: Identity, ago: int) -> None:
        if pair := self.pair(identity, ago):
            self.both(lambda w, side: w.store.lost(pair[side], reason="test"))

    @rule(identity=threads, ago=back, restarted=st.booleans())
    def adopt(self, identity: Identity, ago: int, restarted: bool) -> None:
        pair = self.pair(identity, ago)
        if pair is None:
            return
        if restarted:
            name = self.incarnation(pair[0].node_id)
            pair = (renamed(pair[0], name), renamed(pair[1], name))
        answers = self.both(lambda w, side: w.store.adopt(identity, SPEC, pair[side], data_id="data-1"))
        if answers[0] is True:
            self.routes[identity].append(pair)
            self.overbooked.add(pair[0].node_id)

    # --- operations ---------------------------------------------------------------------------

    @rule(identity=threads, ago=back, expect=st.sampled_from(EXPECT))
    def record(self, identity: Identity, ago: int, expect: str) -> None:
        if pair := self.pair(identity, ago):
            number = next(self.counter)
            op_id, effect = f"o{number}", number % 3 > 0
            answers = self.both(
                lambda w, side: w.record(pair[side], op_id, identity, expect=expect, effect=effect).status
            )
            if answers[0] == "recorded":
                self.ops.append((op_id, identity, pair))

    @precondition(lambda self: self.ops)
    @rule(ago=back)
    def record_again(self, ago: int) -> None:
        op_id, identity, pair = self.ops[-1 - ago % len(self.ops)]
        self.both(lambda w, side: (r := w.record(pair[side], op_id, identity)).status + r.state + (r.reply or "")[:5])

    @precondition(lambda self: self.ops)
    @rule(ago=back)
    def claim(self, ago: int) -> None:
        op_id, _, pair = self.ops[-1 - ago % len(self.ops)]
        self.both(lambda w, side: w.store.claim(op_id, pair[side]).status)

    @precondition(lambda self: self.ops)
    @rule(ago=back, stranger=st.booleans(), only_recorded=st.booleans())
    def finish(self, ago: int, stranger: bool, only_recorded: bool) -> None:
        op_id, _, pair = self.ops[-1 - ago % len(self.ops)]
        reply = '{"ok":{}}' + " " * (5000 if ago else 0)

        def act(world: World, side: int) -> bool:
            route = renamed(pair[side], "stranger") if stranger else pair[side]
            return world.store.finish(
                op_id, route, outcome="ok", reply=reply, keep_s=LONG_S, only_recorded=only_recorded
            )

        self.both(act)

    @precondition(lambda self: self.ops)
    @rule(ago=back)
    def cancel(self, ago: int) -> None:
        op_id = self.ops[-1 - ago % len(self.ops)][0]
        self.both(lambda w, _: (view := w.store.cancel(op_id)) and (view.state, view.outcome))

    # --- what must hold -----------------------------------------------------------------------

    @invariant()
    def both_show_the_same_fleet(self) -> None:
        self.both(lambda w, _: fleet(w, NODES, THREADS))

    @invariant()
    def a_thread_has_one_sandbox_and_places_are_kept(self) -> None:
        for world in self.worlds:
            infos = [i for i in world.store.sandboxes() if i.state != SandboxState.LOST]
            assert max(Counter(i.thread_id for i in infos).values(), default=0) <= 1
            for node in world.store.nodes():
                here = [i for i in infos if i.node_id == node.node_id]
                sure = sum(1 for i in here if i.state != SandboxState.CREATING) + sum(node.blanks.values())
                assert sure <= node.places <= len(here) + len(self.blank_places(world, node.node_id))
                # An adoption alone may take a place too many; until it is given back nobody takes another.
                if node.places <= REPLICAS and world is self.redis:
                    self.overbooked.discard(node.node_id)
                assert node.places <= REPLICAS or node.node_id in self.overbooked

    @invariant()
    def a_user_is_counted_for_the_places_taken(self) -> None:
        for world in self.worlds:
            taken = {one for name in NODES for one in world.counted_on(name) - self.blank_places(world, name)}
            infos = [info for sandbox_id in taken if (info := world.store.sandbox(sandbox_id)) is not None]
            assert len(infos) == len(taken)
            assert world.counted_for(USER) == {info.sandbox_id for info in infos if info.user_id == USER}

    @invariant()
    def whoever_stands_in_line_waits_for_a_place(self) -> None:
        for world in self.worlds:
            line = [parked.digest for parked in world.store.parked()]
            assert len(line) == len(set(line)) == world.store.line_length()
            self.revenants = {identity for identity in self.revenants if identity.digest in line}
            for identity in [identity for identity in THREADS if identity.digest in line]:
                assert world.waiting(identity)
                info = world.store.sandbox(identity.digest[:8])
                assert info is None or info.state == SandboxState.LOST or identity in self.revenants

    @invariant()
    def every_operation_is_answered_once(self) -> None:
        for world in self.worlds:
            answers = Counter(op_id for op_id, _ in world.replies())
            for op_id, _, _ in self.ops:
                view = world.store.op(op_id)
                assert view is not None
                answered = view.state in ("done", "closed") or view.job
                assert answers[op_id] == (answered and op_id not in self.told_again), (op_id, view)
