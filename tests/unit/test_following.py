"""What moves output from a sandbox to its stream: nothing twice, nothing missing, whatever Redis does meanwhile."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet.backends import Completion, Connection, Done, Operation
from sandfleet.errors import Busy, JobNotFound, SandboxLost, SandfleetError, StoreUnavailable
from sandfleet.job_values import OutputChunk, OutputGap
from sandfleet.reading import Reading
from sandfleet.store.base import Output, Pushed
from sandfleet.store.memory import MemoryStore
from sandfleet_workers.following import Follower, Timeline


class Line(Timeline):
    """A timeline without a thread: work is done when the test says so."""

    def __init__(self) -> None:
        super().__init__("test")
        self.now = 0.0
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._waiting, (self.now + delay_s, next(self._numbers), work))

    def step(self) -> bool:
        if not self._waiting:
            return False
        self.now, _, work = heapq.heappop(self._waiting)
        work()
        return True


class Command(Connection):
    """A command that has written this much so far; it keeps so much of each stream."""

    def __init__(self, keeps: int = 10**6) -> None:
        self.out = self.err = b""
        self.running = True
        self.keeps = keeps
        self.error: SandfleetError | None = None
        #: What it says to whoever asks for output.
        self.refuses: SandfleetError | None = None
        self.waiting: list[tuple[Operation, Done]] = []

    def start(self, op: Operation, done: Done) -> None:
        self.waiting.append((op, done))
        self.answer()

    def answer(self, *, late: bool = False) -> None:
        """Answer who asks, if there is anything to tell (or the wait is over)."""
        for op, done in list(self.waiting):
            if self.error is not None:
                self.waiting.remove((op, done))
                done(Completion(error=self.error))
                continue
            if op.kind == "poll_job":
                self.waiting.remove((op, done))
                done(
                    Completion({"running": self.running, "stdout_bytes": len(self.out), "stderr_bytes": len(self.err)})
                )
                continue
            if self.refuses is not None:
                self.waiting.remove((op, done))
                done(Completion(error=self.refuses))
                continue
            value, content = {"running": self.running}, b""
            for name, stream, data in (("", "stdout", self.out), ("stderr_", "stderr", self.err)):
                asked = int(op.args[f"{name}offset"])
                begin = max(asked, len(data) - self.keeps)
                part = data[begin : begin + int(op.args["max_bytes"]) - len(content)]
                value |= {f"{name}offset": begin + len(part), f"{name}skipped": begin - asked}
                value[f"{stream}_bytes"] = len(part)  # type: ignore[assignment]
                content += part
            if content or late or not self.running:
                self.waiting.remove((op, done))
                done(Completion(value, content))

    def cancel(self, op_id: str) -> bool:
        return False

    def close(self) -> None: ...


class Flaky(MemoryStore):
    """A store that is away when it is told so, and may lose an answer."""

    away = False
    loses_answer = False

    def push_output(self, stream: str, output: Output, *, keep_bytes: int, ttl_s: float, anew: bool = False) -> Pushed:
        if self.away:
            raise StoreUnavailable("away")
        pushed = super().push_output(stream, output, keep_bytes=keep_bytes, ttl_s=ttl_s, anew=anew)
        if self.loses_answer:
            self.loses_answer = False
            raise StoreUnavailable("the connection broke")
        return pushed


class World:
    def __init__(self, *, keeps: int = 10**6, keep_bytes: int = 10**6) -> None:
        self.line, self.store, self.command = Line(), Flaky(), Command(keeps)
        self.ends: list[SandfleetError | None] = []
        self.reading = Reading()
        self.got = {"stdout": b"", "stderr": b""}
        self.gaps: list[OutputGap] = []
        self.gone = False
        self.keep_bytes = keep_bytes
        self.follower = self.another()

    def another(self) -> Follower:
        return Follower(
            self.line, self.store, self.command, "c", "s",
            keep_bytes=self.keep_bytes, ttl_s=60, is_gone=lambda: self.gone, over=self.ends.append,
        )  # fmt: skip

    def settle(self, steps: int = 60) -> None:
        for _ in range(steps):
            if not self.line.step():
                self.command.answer()
                if not self.line.step():
                    return

    def read(self) -> None:
        while not self.reading.ended and (
            entries := self.store.read_output("s", *self.reading.read_from, block_s=0, reader="r")
        ):
            for record in self.reading.take(entries):
                if isinstance(record, OutputChunk):
                    self.got[record.stream] += record.data
                elif isinstance(record, OutputGap):
                    self.gaps.append(record)

    def happens(self, event: str, data: bytes) -> None:
        match event:
            case "out":
                self.command.out += data
            case "err":
                self.command.err += data
            case "away" | "back":
                self.store.away = event == "away"
            case "lost answer":
                self.store.loses_answer = True
            case "new node":
                self.follower.stop()
                self.follower = self.another()
                self.follower.begin(resume=True)
            case _:
                self._happens_to_nobody(event)

    def _happens_to_nobody(self, event: str) -> None:
        match event:
            case "forget":
                self.store.forget_everything()
            case "forget the last":
                # As after a fail-over: the new primary has not seen it.
                entries = self.store._outputs.get("s")
                if entries:
                    self.store._outputs.put("s", entries[:-1], 60_000)
            case "two nodes":
                # The old one was paused, and does not know yet that it has ended.
                self.follower = self.another()
                self.follower.begin(resume=True)
            case "steps":
                self.settle(3)
            case "wait over":
                self.command.answer(late=True)
            case "read":
                self.read()


def test_output_comes_as_it_is_written_and_the_end_is_told_once() -> None:
    world = World()
    world.follower.begin(resume=False)
    world.settle()
    world.command.out = b"abc"
    world.settle()
    world.read()
    assert world.got["stdout"] == b"abc"
    world.command.err, world.command.running = b"e", False
    world.settle()
    world.read()
    assert world.got == {"stdout": b"abc", "stderr": b"e"}
    assert world.ends == [None]


def test_a_command_that_has_not_begun_yet_is_asked_again() -> None:
    world = World()
    world.command.error = JobNotFound("not yet")
    world.follower.begin(resume=False)
    for _ in range(5):
        world.line.step()
    world.command.error = None
    world.command.out, world.command.running = b"abc", False
    world.settle()
    world.read()
    assert (world.got["stdout"], world.ends) == (b"abc", [None])


@pytest.mark.parametrize("gone", [False, True])
def test_a_sandbox_that_is_gone_ends_it_at_once(gone: bool) -> None:
    world = World()
    world.gone = gone
    world.command.error = JobNotFound("?") if gone else SandboxLost("dead")
    world.follower.begin(resume=False)
    for _ in range(2):
        world.line.step()
    assert world.ends == [world.command.error]


def test_a_sandbox_that_never_answers_is_given_up() -> None:
    world = World()
    world.command.error = JobNotFound("never")
    world.follower.begin(resume=False)
    world.settle()
    assert world.ends == [world.command.error]


def test_a_follower_that_is_stopped_tells_nobody() -> None:
    world = World()
    world.follower.begin(resume=False)
    world.settle()
    world.follower.stop()
    world.command.running = False
    world.settle()
    assert world.ends == []


def test_a_stream_that_redis_lost_is_brought_back_though_nothing_new_is_written() -> None:
    world = World()
    world.follower.begin(resume=False)
    world.command.out = b"abc"
    world.settle()
    world.store.forget_everything()
    world.command.running = False
    world.settle()
    world.read()
    assert (world.got["stdout"], world.gaps, world.ends) == (b"abc", [], [None])


def test_what_the_sandbox_does_not_keep_any_more_is_a_gap() -> None:
    world = World(keeps=4)
    world.store.away = True
    world.follower.begin(resume=False)
    world.command.out = b"0123456789"
    world.settle(5)
    world.command.out += b"abcdefghij"
    world.store.away = False
    world.settle()
    world.command.running = False
    world.settle()
    world.read()
    missing = sum(gap.missing for gap in world.gaps)
    assert len(world.got["stdout"]) + missing == 20
    assert world.got["stdout"].endswith(b"ghij")


def test_the_last_entries_that_redis_lost_are_brought_back() -> None:
    world = World()
    world.follower.begin(resume=False)
    for letter in (b"a", b"b", b"c"):
        if letter == b"c":
            world.happens("forget the last", b"")
        world.command.out += letter
        world.settle()
    world.command.running = False
    world.settle()
    world.read()
    assert (world.got["stdout"], world.gaps, world.ends) == (b"abc", [], [None])


def test_two_followers_at_once_leave_nothing_out() -> None:
    """A node that was paused still holds what it read; its next run has read something else since."""
    world = World()
    old = world.follower
    old._at = (10, 0)
    world.command.out, world.command.err = b"o" * 40, b"e" * 40
    world.store.push_output("s", Output(0, 0, b"o" * 10), keep_bytes=1000, ttl_s=60)
    world.store.push_output("s", Output(10, 0, b"o" * 5, b"e" * 20), keep_bytes=1000, ttl_s=60)
    old._push(Output(10, 0, b"o" * 10, b"e" * 5))
    world.command.running = False
    world.settle()
    world.read()
    assert (world.got, world.gaps) == ({"stdout": b"o" * 40, "stderr": b"e" * 40}, [])


def test_a_tail_that_could_not_be_read_is_a_gap() -> None:
    world = World()
    world.follower.begin(resume=False)
    world.command.out = b"abc"
    world.settle()
    world.command.out, world.command.err, world.command.running = b"abcdef", b"gh", False
    world.command.refuses = JobNotFound("no")
    world.settle()
    world.read()
    assert [(gap.stream, gap.start, gap.end) for gap in world.gaps] == [("stdout", 3, 6), ("stderr", 0, 2)]
    assert world.ends == [world.command.refuses]


def test_a_sandbox_that_is_too_busy_for_long_is_asked_on() -> None:
    world = World()
    world.follower.begin(resume=False)
    world.command.error = Busy("256 operations run in it")
    world.settle(20)
    world.command.error, world.command.out, world.command.running = None, b"abc", False
    world.settle()
    world.read()
    assert (world.got["stdout"], world.ends) == (b"abc", [None])


@pytest.mark.parametrize("running", [True, False])
def test_a_sandbox_that_tells_of_endless_output_does_not_spoil_the_stream(running: bool) -> None:
    """Behind such an entry no end would find its place: neither the operation's nor that of its dead node."""
    world = World()

    def lie(op: Operation, done: Done) -> None:
        told = {"running": running, "offset": 2**62 + 1, "stderr_offset": 0, "stdout_bytes": 1, "stderr_bytes": 0}
        done(Completion(told, b"x"))

    world.command.start = lie  # type: ignore[method-assign]
    world.follower.begin(resume=False)
    world.settle()
    assert [error.code for error in world.ends if error] == ["internal"]
    assert world.store.read_output("s", 0, 0, block_s=0, reader="r") == []


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("out"), st.binary(min_size=1, max_size=9)),
        st.tuples(st.just("err"), st.binary(min_size=1, max_size=9)),
        st.tuples(st.sampled_from(["away", "back", "lost answer", "forget", "steps", "read", "wait over", "new node",
                                   "two nodes", "forget the last"]), st.just(b"")),
    ),
    max_size=40,
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(events=_EVENTS, keep_bytes=st.sampled_from([7, 10**6]))
def test_whatever_happens_readers_get_each_byte_once_or_a_gap(events: list[tuple[str, bytes]], keep_bytes: int) -> None:
    world = World(keep_bytes=keep_bytes)
    world.follower.begin(resume=False)
    for event, data in events:
        world.happens(event, data)
    world.store.away, world.command.running = False, False
    world.settle(400)
    world.read()
    assert set(world.ends) == {None}
    for stream, written in (("stdout", world.command.out), ("stderr", world.command.err)):
        gaps = [gap for gap in world.gaps if gap.stream == stream]
        assert len(world.got[stream]) + sum(gap.missing for gap in gaps) == len(written), (world.got, gaps)
        if not gaps:
            assert world.got[stream] == written
    if keep_bytes > 1000:
        assert world.gaps == []
