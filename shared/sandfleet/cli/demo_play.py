"""The demo's play: three threads at work, then the death of a node. Every step checks what it got."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sandfleet.cli.demo_journal import Journal, Timed, Wrong, expect
from sandfleet.errors import Cancelled, CommandFailed, OutcomeUnknown, SandboxLost, SandfleetError
from sandfleet.ids import is_sandbox_id, new_op_id
from sandfleet.model import CommandResult, SandboxInfo, SandboxState
from sandfleet.provider import SandboxProvider
from sandfleet.sandbox import Batch, Sandbox
from sandfleet.stack import Stack
from sandfleet.store import Store

__all__ = ["STEPS", "THREADS", "Actor", "play"]

THREADS = ("alice", "bob", "carol")
_WORK = "/mnt/user-data/workspace"
_PROGRAM = """\
def primes(limit):
    found = []
    for number in range(2, limit):
        if all(number % p for p in found):
            found.append(number)
    return found


print("primes below 30:", *primes(30))
"""
_LINES = 20_000
_NOOPS = 20
_WARM_ROUNDS = 3
#: Of one thread's day, then of the node's death, then of the survivors.
_STEPS_PER_THREAD, _STEPS_OF_THE_DEATH = 12, 4
STEPS = _STEPS_PER_THREAD * len(THREADS) + _STEPS_OF_THE_DEATH


def play(stack: Stack, journal: Journal) -> None:
    """Play it all. What goes wrong is in the journal; a thread whose step went wrong does not go on."""
    with SandboxProvider(stack.settings) as provider, SandboxProvider(stack.settings) as supervisor:
        actors = [Actor(name, provider, supervisor, stack.store, journal) for name in THREADS]
        with ThreadPoolExecutor(len(actors), thread_name_prefix="demo") as threads:
            going_on = list(threads.map(_unless_wrong, [actor.day for actor in actors]))
        if all(going_on):
            _unless_wrong(lambda: _node_dies(stack, journal, actors))


def _unless_wrong(part: Callable[[], None]) -> bool:
    try:
        part()
    except Wrong:
        return False
    return True


class Actor:
    """One agent thread and its sandbox."""

    def __init__(
        self, name: str, provider: SandboxProvider, supervisor: SandboxProvider, store: Store, journal: Journal
    ) -> None:
        self.name = name
        self.provider = provider
        #: Another client, as another process would be: it cancels from elsewhere.
        self.supervisor = supervisor
        self.store = store
        self.journal = journal
        self.sandbox_id = ""
        self.node = ""

    @property
    def sandbox(self) -> Timed:
        """The actor's sandbox, every call counted."""
        return Timed(self.handle(self.provider), self.journal)

    def handle(self, provider: SandboxProvider) -> Sandbox:
        """A handle of a provider on the actor's sandbox."""
        handle = provider.get(self.sandbox_id)
        if handle is None:
            raise Wrong(f"no handle for {self.sandbox_id}")
        return handle

    def info(self) -> SandboxInfo:
        """What the registry says of the actor's sandbox."""
        found = self.store.sandbox(self.sandbox_id)
        if found is None:
            raise Wrong(f"the registry does not know {self.sandbox_id}")
        return found

    def day(self) -> None:
        """Everything a thread does before its node may die."""
        self._acquire()
        for name, part in (
            ("write a program", self._write),
            ("run it", self._run),
            ("grep it", self._grep),
            ("edit it", self._edit),
            ("run it again", self._run_again),
            ("read lines of a large file", self._read_range),
            ("fail a command", self._fail),
            ("cancel a runaway", self._cancel),
            ("batch of three", self._batch),
            ("20 no-ops", self._noops),
        ):
            with self.journal.step(name, self.name, self.node, self.sandbox_id) as step:
                step.told = part()
        self._release_and_return()

    # --- its steps: each gives what to tell, or raises Wrong ------------------------------------

    def _acquire(self) -> None:
        with self.journal.step("acquire (new)", self.name) as step:
            self.sandbox_id = self.journal.timed("acquire_new", lambda: self.provider.acquire(self.name))
            expect(is_sandbox_id(self.sandbox_id), f"{self.sandbox_id!r} is not a sandbox id")
            info = self.info()
            self.node, step.node, step.sandbox = info.node_id, info.node_id, self.sandbox_id
            expect(info.thread_id == self.name, f"it belongs to {info.thread_id}")
            expect(info.state is SandboxState.LIVE, f"it is {info.state}, not live")
            step.told = "a sandbox of its own"

    def _write(self) -> str:
        self.sandbox.write_file(f"{_WORK}/primes.py", _PROGRAM)
        size = self.sandbox.stat(f"{_WORK}/primes.py").size
        expect(size == len(_PROGRAM), f"{size} bytes arrived of {len(_PROGRAM)}")
        names = self.sandbox.list_dir(_WORK)
        expect(f"{_WORK}/primes.py" in names, f"the directory lists {names}")
        return f"primes.py, {size} bytes"

    def _run(self) -> str:
        return self._prints("primes below 30: 2 3 5 7 11 13 17 19 23 29")

    def _run_again(self) -> str:
        return self._prints("primes below 12: 2 3 5 7 11")

    def _prints(self, line: str) -> str:
        result: CommandResult = self.sandbox.run(["python3", "primes.py"], timeout_s=20)
        expect(result.exit_code == 0, f"exit code {result.exit_code}: {result.stderr.strip()[-200:]}")
        expect(result.stdout == line + "\n", f"it printed {result.stdout!r}")
        return line

    def _grep(self) -> str:
        matches, more = self.sandbox.grep(_WORK, r"primes\(", glob="*.py")
        found = [(match.path, match.line_number) for match in matches]
        expect(found == [(f"{_WORK}/primes.py", 1), (f"{_WORK}/primes.py", 9)], f"it found {found}")
        expect(not more, "it says there is more")
        return "2 matches, lines 1 and 9"

    def _edit(self) -> str:
        count = self.sandbox.str_replace(f"{_WORK}/primes.py", "30", "12", replace_all=True)
        expect(count == 2, f"{count} replacements instead of 2")
        text = self.sandbox.read_file(f"{_WORK}/primes.py")
        expect(text == _PROGRAM.replace("30", "12"), "the file is not what the edit should make of it")
        return "2 replacements"

    def _read_range(self) -> str:
        lines = [f"{number:05d} {self.name} was here, in a line of its own" for number in range(1, _LINES + 1)]
        self.sandbox.write_file(f"{_WORK}/large.txt", "\n".join(lines) + "\n")
        text = self.sandbox.read_file(f"{_WORK}/large.txt", 12_345, 12_349)
        wanted = "\n".join(lines[12_344:12_349])
        expect(text.rstrip("\n") == wanted, f"it read {text[:80]!r}…")
        return f"5 of {_LINES} lines"

    def _fail(self) -> str:
        result: CommandResult = self.sandbox.run("echo no such luck >&2; exit 3")
        expect(result.exit_code == 3, f"exit code {result.exit_code} instead of 3")
        expect(result.stderr == "no such luck\n", f"stderr {result.stderr!r}")
        try:
            result.check()
        except CommandFailed as exc:
            expect(exc.facts.get("exit_code") == 3, f"check() told {exc.facts}")
            return "exit code 3, check() raised CommandFailed"
        raise Wrong("check() did not raise")

    def _cancel(self) -> str:
        op_id = new_op_id()
        with _Background(lambda: self.sandbox.run("while :; do :; done", op_id=op_id, timeout_s=60)) as running:
            self.await_running(op_id)
            expect(self.handle(self.supervisor).cancel(op_id), "cancel() says it was over already")
            result = running.result(within_s=10)
        if isinstance(result, CommandResult):
            expect(result.cancelled, f"it ended with {result.exit_code}, not cancelled")
            return f"ended by its op id ({result.signal or 'cancelled'}) after {result.duration_s:.1f} s"
        expect(isinstance(result, Cancelled), f"it ended with {result!r}")
        return "ended by its op id"

    def await_running(self, op_id: str) -> None:
        """Return when the operation was started on its node.

        Raises:
            Wrong: It was not, within 10 seconds.
        """
        until = time.monotonic() + 10
        while (view := self.store.op(op_id)) is None or view.state != "claimed":
            expect(time.monotonic() < until, f"operation {op_id} did not start: {view}")
            time.sleep(0.01)

    def _batch(self) -> str:
        batch = Batch().write_file(f"{_WORK}/a.txt", "one\ntwo\n").run("wc -l < a.txt").read_file(f"{_WORK}/a.txt")
        answers = self.sandbox.batch(batch)
        expect(len(answers) == 3, f"{len(answers)} answers instead of 3")
        expect(getattr(answers[1], "stdout", "").strip() == "2", f"wc answered {answers[1]!r}")
        expect(answers[2] == b"one\ntwo\n", f"the read answered {answers[2]!r}")
        return "write, run, read in one round trip"

    def _noops(self) -> str:
        sandbox = self.handle(self.provider)
        for _ in range(_NOOPS):
            self.journal.timed("noop", sandbox.noop)
        return "to the node and back"

    def _release_and_return(self) -> None:
        with self.journal.step("release, acquire (warm)", self.name, self.node, self.sandbox_id) as step:
            for _ in range(_WARM_ROUNDS):
                before = self.info()
                self.provider.release(self.sandbox_id)
                expect(self.info().state is SandboxState.WARM, f"after release it is {self.info().state}")
                again = self.journal.timed("acquire_warm", lambda: self.provider.acquire(self.name))
                expect(again == self.sandbox_id, f"another id: {again}")
                expect(self.info().epoch == before.epoch, "it is another sandbox")
            text = self.sandbox.read_file(f"{_WORK}/a.txt")
            expect(text == "one\ntwo\n", f"its file now says {text!r}")
            step.told = "same sandbox, files still there"


# --- the death of a node -----------------------------------------------------------------------


def _node_dies(stack: Stack, journal: Journal, actors: list[Actor]) -> None:
    """SIGKILL the node with the fewest threads while one of them runs a command, and the others work on."""
    threads_on = Counter(actor.node for actor in actors)
    with journal.step("several nodes took part", "all") as step:
        expect(len(threads_on) > 1, f"all threads were placed on {dict(threads_on)}")
        step.told = ", ".join(f"{count} on {node}" for node, count in sorted(threads_on.items()))
    doomed = min(sorted(threads_on), key=lambda node: threads_on[node])
    victim = next(actor for actor in actors if actor.node == doomed)
    others = [actor for actor in actors if actor.node != doomed]
    stop = threading.Event()
    with ThreadPoolExecutor(len(others), thread_name_prefix="demo") as pool:
        try:
            at_work = [pool.submit(_work_on, actor, stop) for actor in others]
            _answered_in_time(stack, journal, victim)
            _starts_again(stack, journal, victim)
        finally:
            stop.set()
    with journal.step("the others went on", ", ".join(actor.name for actor in others), others[0].node) as step:
        done = [future.result() for future in at_work]
        expect(all(done), "one of them did nothing meanwhile")
        step.told = f"{sum(done)} commands meanwhile, each with its right answer"


def _answered_in_time(stack: Stack, journal: Journal, victim: Actor) -> None:
    lease_s = stack.settings.lease_s
    with journal.step(f"kill -9 {victim.node}", victim.name, victim.node, victim.sandbox_id) as step:
        op_id = new_op_id()
        run = victim.handle(victim.provider).run
        with _Background(lambda: run("sleep 30; echo too late", op_id=op_id, timeout_s=60)) as running:
            victim.await_running(op_id)
            killed_at = time.monotonic()
            stack.kill_node(victim.node)
            answer = running.result(within_s=2 * lease_s + 1)
        took_s = time.monotonic() - killed_at
        expect(isinstance(answer, OutcomeUnknown | SandboxLost), f"its command was answered with {answer!r}")
        expect(took_s <= 2 * lease_s, f"that took {took_s:.1f} s, more than two leases of {lease_s:g} s")
        try:
            victim.handle(victim.provider).run("true")
        except SandboxLost:
            step.told = f"{type(answer).__name__} after {took_s:.1f} s, then SandboxLost"
        else:
            raise Wrong("the next command was carried out, though the sandbox is gone")


def _starts_again(stack: Stack, journal: Journal, victim: Actor) -> None:
    before, dead = victim.info(), victim.node
    with journal.step("acquire (after the loss)", victim.name) as step:
        started = time.monotonic()
        victim.sandbox_id = victim.provider.acquire(victim.name)
        took_ms = (time.monotonic() - started) * 1000
        info = victim.info()
        step.node, step.sandbox, victim.node = info.node_id, victim.sandbox_id, info.node_id
        expect(info.node_id != dead, f"it was placed on {dead}, which is dead")
        expect(info.epoch > before.epoch, "it is not a new sandbox")
        result: CommandResult = victim.sandbox.run(["python3", "primes.py"], timeout_s=20)
        expect(result.stdout == "primes below 12: 2 3 5 7 11\n", f"its program printed {result.stdout!r}")
        step.told = f"a new sandbox in {took_ms:.0f} ms, files still there"


def _work_on(actor: Actor, stop: threading.Event) -> int:
    """Run commands until told to stop; how many, 0 as soon as one was wrong."""
    done = 0
    while not stop.is_set():
        try:
            result: CommandResult = actor.sandbox.run(["echo", f"{actor.name} {done}"])
        except SandfleetError:
            return 0
        if result.stdout != f"{actor.name} {done}\n":
            return 0
        done += 1
        stop.wait(0.05)
    return done


class _Background:
    """A call on a thread of its own; its answer, be it an error."""

    def __init__(self, call: Callable[[], CommandResult]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="demo-background")
        self._future = self._pool.submit(call)

    def result(self, *, within_s: float) -> CommandResult | BaseException:
        """What it gave or raised.

        Raises:
            TimeoutError: Neither, within ``within_s``.
        """
        error = self._future.exception(timeout=within_s)
        return error if error is not None else self._future.result()

    def __enter__(self) -> _Background:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=False)
