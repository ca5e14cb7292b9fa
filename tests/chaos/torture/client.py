"""One client process of the torture: a few threads that work in conversations and write down what they are told."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandfleet import Batch, CommandResult, Sandbox, SandboxProvider, calls
from sandfleet.client import Call
from sandfleet.config import Settings
from sandfleet.errors import Cancelled, SandfleetError
from sandfleet.store.base import OpRecord, Push, Recorded
from tests.chaos.torture.evidence import APPENDS, FILES, JOURNAL, REPLACED
from tests.chaos.torture.intents import Intent, IntentLog, read_intents

WORKSPACE = "/mnt/user-data/workspace"
RUN_S = 10.0
QUEUE_S = 20.0
ACQUIRE_S = 25.0
FILE_S = 60.0  # the deadline that the client itself gives to whatever is no command
#: Messages above this are not kept for redelivery.
CAPTURE_BYTES = 20_000


def effect_command(effect: str, *, before: str = "", after: str = "") -> str:
    """A command that leaves one line: its id and a nonce that no other run of it has."""
    write = f"read nonce < /proc/sys/kernel/random/uuid; printf '%s %s\\n' {effect} $nonce >> {WORKSPACE}/journal"
    return "; ".join(part for part in (before, write, after) if part)


class Worker(threading.Thread):
    """A thread of the client: acquires a conversation, works in it for a while, takes another one."""

    def __init__(self, options: argparse.Namespace, provider: SandboxProvider, log: IntentLog, number: int) -> None:
        super().__init__(name=f"worker-{number}")
        self._options, self._provider, self._log = options, provider, log
        self._rng = random.Random(f"{options.seed}-{log.run}-{number}")
        self._conversation = ""
        self._jobs = "background" in inspect.signature(Sandbox.run).parameters
        self._kinds: dict[Callable[[Sandbox], None], int] = {
            self.command: 30,
            self.session: 8,
            self.append: 12,
            self.write: 12,
            self.replace: 10,
            self.batch: 8,
            self.read: 12,
            self.timeout: 4,
            self.cancel: 4,
            self.job: 8 if self._jobs else 0,
        }

    def run(self) -> None:
        while not stopping.is_set():
            self._conversation = self._rng.choice(self._options.conversations)
            sandbox = self._acquire()
            if sandbox is None:
                stopping.wait(self._rng.uniform(0.1, 0.5))
                continue
            for _ in range(self._rng.randint(2, 12)):
                (kind,) = self._rng.choices(list(self._kinds), list(self._kinds.values()))
                kind(sandbox)
                if stopping.wait(self._rng.uniform(0, self._options.think_s)):
                    break
            self._leave(sandbox)

    # --- around a sandbox ----------------------------------------------------------------------

    def _acquire(self) -> Sandbox | None:
        roams = self._conversation in self._options.roaming
        on_lost = "restore" if roams else "wait_for_home"
        got = self._tell(
            self._intent("acquire", "", ACQUIRE_S),
            lambda: self._provider.acquire(self._conversation, timeout_s=ACQUIRE_S, on_lost=on_lost),
        )
        return self._provider.get(got) if got else None

    def _leave(self, sandbox: Sandbox) -> None:
        if self._rng.random() < 0.06:
            self._tell(self._intent("destroy", "", 30.0), lambda: self._provider.destroy(sandbox.id))
        else:
            self._tell(self._intent("release", "", 30.0), lambda: self._provider.release(sandbox.id))

    # --- one call ------------------------------------------------------------------------------

    def _intent(self, kind: str, trace: str, within_s: float, **more: Any) -> Intent:
        return Intent(
            id=self._log.new_id(),
            kind=kind,
            conversation=self._conversation,
            trace=trace,
            run=self._log.run,
            within_s=within_s,
            began_s=time.monotonic(),
            **more,
        )

    def _tell(self, intent: Intent, call: Callable[[], Any]) -> Any:
        self._log.begin(intent)
        return tell(self._log, intent, call)

    def _ask(self, sandbox: Sandbox, intent: Intent, call: Call) -> None:
        """One call under the id of its effect, so that the logs of the fleet tell of it."""
        self._tell(intent, lambda: sandbox._call(replace(call, op_id=intent.id, queue_timeout_s=QUEUE_S)))

    def _run(self, sandbox: Sandbox, kind: str, command: Callable[[str], str], **options: Any) -> None:
        timeout_s = options.pop("timeout_s", RUN_S)
        intent = self._intent(kind, JOURNAL, QUEUE_S + timeout_s)
        options |= {"timeout_s": timeout_s, "queue_timeout_s": QUEUE_S, "op_id": intent.id}
        self._tell(intent, lambda: sandbox.run(command(intent.id), **options))

    # --- kinds of calls ------------------------------------------------------------------------

    def command(self, sandbox: Sandbox) -> None:
        long = self._rng.random()
        before = f"sleep {self._rng.uniform(0.2, 6):.1f}" if long < 0.2 else ""
        after = f"sleep {self._rng.uniform(0.2, 6):.1f}" if 0.2 <= long < 0.35 else ""
        self._run(sandbox, "command", lambda effect: effect_command(effect, before=before, after=after))

    def session(self, sandbox: Sandbox) -> None:
        name = self._rng.choice(("one", "two"))
        self._run(sandbox, "session", effect_command, session=name)

    def timeout(self, sandbox: Sandbox) -> None:
        self._run(sandbox, "timeout", lambda effect: effect_command(effect, after="sleep 5"), timeout_s=0.5)

    def cancel(self, sandbox: Sandbox) -> None:
        intent = self._intent("cancelled", JOURNAL, QUEUE_S + RUN_S)
        self._log.begin(intent)

        def later() -> None:
            with contextlib.suppress(SandfleetError):
                sandbox.cancel(intent.id)

        timer = threading.Timer(self._rng.uniform(0, 1.5), later)
        timer.start()
        command = effect_command(intent.id, before="sleep 0.7", after="sleep 0.7")
        options = {"timeout_s": RUN_S, "queue_timeout_s": QUEUE_S, "op_id": intent.id}
        tell(self._log, intent, lambda: sandbox.run(command, **options))
        timer.join()

    def append(self, sandbox: Sandbox) -> None:
        intent = self._intent("append", APPENDS, FILE_S + QUEUE_S)
        self._ask(sandbox, intent, calls.write(f"{WORKSPACE}/appends", f"{intent.id}\n", True))

    def write(self, sandbox: Sandbox) -> None:
        lines = 40_000 if self._rng.random() < 0.05 else self._rng.randint(1, 50)
        intent = self._intent("write", FILES, FILE_S + QUEUE_S, lines=lines)
        text = f"{intent.id}\n" * lines
        self._ask(sandbox, intent, calls.write(f"{WORKSPACE}/files/{intent.id}", text))

    def replace(self, sandbox: Sandbox) -> None:
        intent = self._intent("replace", REPLACED, FILE_S + QUEUE_S)
        call = calls.replace_text(f"{WORKSPACE}/replaced", "END\n", f"{intent.id}\nEND\n", False, None)
        self._ask(sandbox, intent, call)
        if intent.answer == "path_not_found":
            first = self._intent("begin_replaced", "", FILE_S + QUEUE_S)
            # Only one of those who find nothing may put it there.
            self._ask(sandbox, first, calls.write(f"{WORKSPACE}/replaced", "END\n", False, ""))

    def batch(self, sandbox: Sandbox) -> None:
        intent = self._intent("batch", JOURNAL, QUEUE_S + RUN_S)
        intent.more = {APPENDS: f"{intent.id}b", FILES: f"{intent.id}c"}
        several = (
            Batch()
            .write_file(f"{WORKSPACE}/appends", f"{intent.id}b\n", append=True)
            .run(effect_command(intent.id))
            .write_file(f"{WORKSPACE}/files/{intent.id}c", f"{intent.id}c\n")
        )
        call = calls.batch(several.calls, stop_on_error=True, timeout_s=RUN_S)
        self._tell(
            intent,
            lambda: calls.batch_results(sandbox._call(replace(call, op_id=intent.id, queue_timeout_s=QUEUE_S))),
        )

    def read(self, sandbox: Sandbox) -> None:
        call = self._rng.choice(
            (
                calls.list_call(WORKSPACE, 1),
                calls.read(f"{WORKSPACE}/appends"),
                calls.glob(WORKSPACE, "**/*", False, 50),
                Call("health", {}, timeout_s=10.0),
            )
        )
        self._ask(sandbox, self._intent(f"read_{call.kind}", "", FILE_S + QUEUE_S), call)

    def job(self, sandbox: Sandbox) -> None:
        pause_s = self._rng.uniform(0, 8)
        intent = self._intent("job", JOURNAL, 2 * QUEUE_S + 60.0)
        command = effect_command(intent.id, before=f"echo begun; sleep {pause_s:.1f}", after="echo over")
        options: dict[str, Any] = {"timeout_s": 30.0, "queue_timeout_s": QUEUE_S, "op_id": intent.id}

        def start_and_wait() -> Any:
            job = sandbox.run(command, background=True, **options)  # type: ignore[call-overload]
            return job.wait(timeout_s=60.0)

        self._tell(intent, start_and_wait)


def tell(log: IntentLog, intent: Intent, call: Callable[[], Any]) -> Any:
    """Make the call and write down what came of it; its value when that is good."""
    value = None
    try:
        value = call()
        answer, detail = _answer_of(value)
    except Cancelled as exc:
        never = exc.facts.get("started") is False
        answer, detail = "never_started_cancelled" if never else "cancelled", str(exc)
    except SandfleetError as exc:
        answer, detail = exc.code, str(exc)
    except Exception as exc:  # noqa: BLE001  (whatever it is, the judge hears of it)
        answer, detail = f"!{type(exc).__name__}", str(exc)
    intent.answer = answer
    log.end(intent, answer, detail)
    return value if answer == "ok" else None


def _answer_of(value: Any) -> tuple[str, str]:
    """What an answer without an error says."""
    if isinstance(value, CommandResult):
        if value.timed_out or value.cancelled:
            return "timed_out" if value.timed_out else "cancelled", ""
        return ("ok", "") if value.exit_code == 0 else (f"exit_{value.exit_code}", value.stderr)
    if isinstance(value, list) and any(isinstance(item, SandfleetError) for item in value):
        return "part_of_batch", "; ".join(str(item) for item in value if isinstance(item, SandfleetError))
    if isinstance(value, list) and any(isinstance(item, CommandResult) and item.exit_code != 0 for item in value):
        return "part_of_batch", "the command failed"
    return "ok", ""


def keep_messages(provider: SandboxProvider, path: Path) -> None:
    """Write down what is published, for the harness to deliver again."""
    store = provider._client().store
    record = store.record
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def recording(op: OpRecord, push: Push | None, **options: Any) -> Recorded:
        if push is not None and len(push.message) <= CAPTURE_BYTES:
            os.write(fd, json.dumps([push.queue, push.message]).encode() + b"\n")
        return record(op, push, **options)

    store.record = recording  # type: ignore[method-assign]


def repeat(options: argparse.Namespace, provider: SandboxProvider, log: IntentLog) -> None:
    """Ask again, under the same op ids, for what a killed predecessor never heard of."""
    for old in read_intents([options.repeat]):
        if old.answer is None and old.kind in ("command", "session") and not stopping.is_set():
            again = replace(old, kind=f"repeated_{old.kind}", run=log.run, within_s=90.0, began_s=time.monotonic())
            log.begin(again)

            def call(old: Intent = old) -> CommandResult | None:
                sandbox = provider.get(provider.acquire(old.conversation, timeout_s=ACQUIRE_S))
                assert sandbox is not None
                timeouts = {"timeout_s": RUN_S, "queue_timeout_s": QUEUE_S}
                return sandbox.run(effect_command(old.id), op_id=old.id, **timeouts)  # type: ignore[arg-type]

            tell(log, again, call)


stopping = threading.Event()


def main() -> None:
    """Work until SIGTERM; ends when every call was answered."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--think-s", type=float, default=0.3)
    parser.add_argument("--conversations", type=lambda text: text.split(","), required=True)
    parser.add_argument("--roaming", type=lambda text: text.split(","), default=[])
    parser.add_argument("--repeat", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    log = IntentLog(options.directory / "intents", options.run)
    settings = Settings.load(acquire_timeout_s=ACQUIRE_S, agent_ttl_s=6.0)
    with SandboxProvider(settings) as provider:
        keep_messages(provider, options.directory / f"{options.run}.messages")
        if options.repeat is not None:
            repeat(options, provider, log)
        workers = [Worker(options, provider, log, number) for number in range(options.threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
