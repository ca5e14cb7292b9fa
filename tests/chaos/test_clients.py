"""Promises to callers: other clocks, forks, event loops, deaths, and many first uses at once."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import signal
import threading
from pathlib import Path

import pytest
import redis

from sandfleet import AsyncSandboxProvider, CommandResult
from sandfleet.ids import Identity
from sandfleet.model import SandboxState
from tests.chaos.fleet import Answers, Fleet, Gate, Process, errors, unique
from tests.services import wait_until

REPOSITORY = Path(__file__).parents[2]

CLIENT = """
import json, sys, time
from sandfleet import SandboxProvider
from sandfleet.config import Settings

thread, label = sys.argv[1], sys.argv[2]
labels = {"for": label}
settings = Settings.load(labels=labels, queue_timeout_s=8.0, command_timeout_s=8.0, acquire_timeout_s=20.0)
"""
"""The start of every client script; ``sys.argv`` has the thread and the label of the nodes wanted."""


def story_of(fleet: Fleet, *processes: Process) -> str:
    return "\n".join([fleet.story(), *(process.tail(60) for process in processes)])


def finished(fleet: Fleet, process: Process, deadline_s: float = 40.0) -> list[object]:
    """What a client script printed, one JSON value a line, once it ended well."""
    wait_until(lambda: not process.running, deadline_s, story=lambda: story_of(fleet, process))
    assert process.popen.returncode == 0, story_of(fleet, process)
    return [json.loads(line) for line in process.output.splitlines() if line.startswith(("{", "["))]


# -- clocks -----------------------------------------------------------------------------------------------

SKEW = """
import os, time
_off = float(os.environ["CLOCK_OFFSET_S"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _off
time.time_ns = lambda: _time_ns() + int(_off * 1e9)
"""


@pytest.mark.chaos
def test_clocks_of_client_and_node_two_minutes_apart_change_nothing(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SKEW)
    label = unique("clock")
    ahead = {"PYTHONPATH": str(tmp_path), "CLOCK_OFFSET_S": "60"}
    behind = {"PYTHONPATH": str(tmp_path), "CLOCK_OFFSET_S": "-60"}
    node = fleet.node(label, label=label, env=ahead)
    script = CLIENT + (
        "with SandboxProvider(settings) as provider:\n"
        "    sandbox = provider.get(provider.acquire(thread))\n"
        "    results = [sandbox.run(f'echo {n}', timeout_s=5.0, queue_timeout_s=5.0) for n in range(5)]\n"
        "    slow = sandbox.run('sleep 30', timeout_s=0.5)\n"
        "    t = [r.timings for r in results]\n"
        "    print(json.dumps({'clock': time.time(), 'out': [r.stdout for r in results],\n"
        "        'timed_out': slow.timed_out,\n"
        "        'queued_ms': [x.queued_ms for x in t], 'total_ms': [x.total_ms for x in t]}))\n"
    )
    client = fleet.client_script("client-behind", script, label, label, **behind)
    (told,) = finished(fleet, client)
    assert isinstance(told, dict)
    server_s = fleet.store.now_ms() / 1000
    assert told["clock"] < server_s - 50, "the shim works in the client"
    assert told["out"] == [f"{n}\n" for n in range(5)]
    assert told["timed_out"] is True
    assert all(-1000 < queued < total + 1000 for queued, total in zip(told["queued_ms"], told["total_ms"], strict=True))
    fleet.end(node)


WALL_CLOCKS = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")


def test_no_product_code_on_a_clients_or_nodes_way_asks_the_wall_clock() -> None:
    # sandboxd tells ages inside one sandbox; the clock module and the in-memory store are wall clocks by trade;
    # the command line shows times, and its doctor compares clocks.
    exempt = {"clock.py", "sandboxd.py", "memory_state.py"}
    found = []
    for package in ("shared/sandfleet", "workers/sandfleet_workers", "scheduler/sandfleet_scheduler"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            if path.name in exempt or {"testing", "cli"} & set(path.parts):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS:
                    found.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert not found


# -- forks and loops --------------------------------------------------------------------------------------


def test_children_forked_after_the_client_was_used_and_their_parent_all_get_their_own_answers(fleet: Fleet) -> None:
    thread = unique("fork")
    script = CLIENT + (
        "import os, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "provider = SandboxProvider(settings)\n"
        "sandbox = provider.get(provider.acquire(thread))\n"
        "assert sandbox.run('echo parent').stdout == 'parent\\n'\n"
        "def work(name):\n"
        "    out = [sandbox.run(f'echo {name}-{n}').stdout.strip() for n in range(10)]\n"
        "    own = provider.get(provider.acquire(f'{thread}-{name}'))\n"
        "    out.append(own.run('echo own-' + name).stdout.strip())\n"
        "    return out\n"
        "children = []\n"
        "for n in range(2):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        code = 1\n"
        "        try:\n"
        "            name = f'child{n}'\n"
        "            sys.stdout.write(json.dumps([name, provider._client().id, work(name)]) + '\\n')\n"
        "            sys.stdout.flush()\n"
        "            provider.shutdown()\n"
        "            code = 0\n"
        "        except BaseException:\n"
        "            import traceback; traceback.print_exc()\n"
        "        os._exit(code)\n"
        "    children.append(pid)\n"
        "mine = work('parent')\n"
        "codes = [os.waitpid(pid, 0)[1] for pid in children]\n"
        "after = sandbox.run('echo after').stdout.strip()\n"
        "sys.stdout.write(json.dumps(['parent', provider._client().id, mine]) + '\\n')\n"
        "provider.shutdown()\n"
        "assert codes == [0, 0], codes\n"
        "assert after == 'after', after\n"
    )
    told = finished(fleet, fleet.client_script("forking-client", script, thread, "n1"))
    by_name = {name: (client, out) for name, client, out in told}  # type: ignore[misc]
    assert set(by_name) == {"parent", "child0", "child1"}
    for name, (_client, out) in by_name.items():
        assert out == [*(f"{name}-{n}" for n in range(10)), f"own-{name}"]
    assert len({client for client, _ in by_name.values()}) == 3, "each process is a client of its own"


def test_two_event_loops_share_one_provider_and_each_gets_its_answers(fleet: Fleet) -> None:
    thread = unique("loops")
    provider = AsyncSandboxProvider(fleet.settings())
    answers: Answers[list[str]] = Answers(fleet)

    async def one(name: str) -> list[str]:
        own = provider.get(await provider.acquire(f"{thread}-{name}"))
        both = provider.get(await provider.acquire(thread))
        assert own is not None
        assert both is not None
        calls = [sandbox.run(f"echo {name}-{n}") for n in range(10) for sandbox in (own, both)]
        results: list[CommandResult] = await asyncio.gather(*calls)
        return [result.stdout.strip() for result in results]

    try:
        for name in ("left", "right"):
            answers.ask(name, lambda n=name: asyncio.run(one(n)))
        got = answers.all()
        assert not errors(got)
        for name in ("left", "right"):
            assert got[name] == [f"{name}-{n}" for n in range(10) for _ in range(2)]
    finally:
        asyncio.run(provider.shutdown())


# -- deaths -----------------------------------------------------------------------------------------------


@pytest.mark.chaos
def test_a_client_killed_while_it_waits_leaves_a_warm_sandbox_and_no_key_that_stays(
    fleet: Fleet, broker: redis.Redis
) -> None:
    thread = unique("dead-client")
    gate = Gate(fleet, thread)
    script = CLIENT + (
        "settings = settings.model_copy(update={'agent_ttl_s': 2.0})\n"
        "import threading\n"
        "provider = SandboxProvider(settings)\n"
        "sandbox = provider.get(provider.acquire(thread))\n"
        f"print(json.dumps([provider._client().id, sandbox.id]), flush=True)\n"
        f"one = threading.Thread(target=lambda: sandbox.run({gate.command!r}, op_id=thread + '-running'))\n"
        "one.start()\n"
        "sandbox.run('cat', stdin=b'x' * 600_000, op_id=thread + '-waiting')\n"
    )
    before = set(fleet.store.keys())
    client = fleet.client_script("doomed-client", script, thread, "n1")
    wait_until(gate.is_reached, 40, story=lambda: story_of(fleet, client))
    op_ids = [f"{thread}-running", f"{thread}-waiting"]
    wait_until(lambda: all(fleet.store.op(op_id) for op_id in op_ids), 20, story=lambda: story_of(fleet, client))
    told = [json.loads(line) for line in client.output.splitlines() if line.startswith("[")]
    client_id, sandbox_id = told[0]

    client.kill()
    gate.open()

    def is_warm() -> bool:
        info = fleet.store.sandbox(sandbox_id)
        assert info is not None
        assert (info.agents, info.ops) == (0, 0)
        return info.state is SandboxState.WARM

    wait_until(is_warm, 20, story=lambda: fleet.story(sandbox_id))
    for op_id in op_ids:
        view = fleet.store.op(op_id)
        assert view is not None
        assert view.state == "done"

    digest = Identity(thread).digest
    the_threads_own = {f"sandfleet:{kind}:{sandbox_id}" for kind in ("sandbox", "id", "story")}
    the_threads_own |= {f"sandfleet:thread:{digest}"}
    the_fleets_own = {f"sandfleet:{kind}" for kind in ("blobs", "bytes", "sandboxes", "lock:reconcile")}
    the_fleets_own |= {f"sandfleet:{kind}:n1" for kind in ("places", "warm", "inflight")}
    for key in set(fleet.store.keys()) - before:
        assert f":{sandbox_id}" not in key or key in the_threads_own, f"{key}: holds and busy marks are gone"
        limit_ms = 31 * 86_400_000 if key in the_threads_own | the_fleets_own else 180_000
        if key.startswith("sandfleet:op:"):
            limit_ms = 2 * 3_600_000  # the id of an effect protects for an hour beyond its deadline
        # -2: expired already. -1 would be a key that stays for ever.
        left_ms = broker.pttl(key)
        assert left_ms == -2 or 0 < left_ms <= limit_ms, (key, left_ms)
    assert f"sandfleet:reply:{client_id}" not in before

    with fleet.provider() as provider:
        assert provider.acquire(thread) == sandbox_id


# -- first uses, and a scheduler that dies ------------------------------------------------------------------


def test_five_threads_that_use_a_thread_first_at_the_same_time_share_one_sandbox(fleet: Fleet) -> None:
    thread = unique("first-threads")
    answers: Answers[str] = Answers(fleet)
    barrier = threading.Barrier(5)
    with contextlib.ExitStack() as stack:
        providers = [stack.enter_context(fleet.provider()) for _ in range(5)]

        def first(number: int) -> str:
            barrier.wait(10)
            sandbox = providers[number].get(providers[number].acquire(thread))
            assert sandbox is not None
            sandbox.run(f"echo {number} >> log")
            return sandbox.id

        for number in range(5):
            answers.ask(number, lambda n=number: first(n))
        got = answers.all()
        assert not errors(got)
        assert len(set(got.values())) == 1
        assert sorted(fleet.numbers(thread)) == list(range(5))
        events = [entry["event"] for entry in fleet.store.story(str(got[0]))]
        assert events.count("reserved") == 1, fleet.story(str(got[0]))


@pytest.mark.chaos
def test_five_processes_that_use_a_thread_first_at_the_same_time_share_one_sandbox(fleet: Fleet) -> None:
    thread = unique("first-processes")
    script = CLIENT + (
        "import os\n"
        "children = []\n"
        "read, write = os.pipe()\n"
        "for n in range(5):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os.close(write)\n"
        "        os.read(read, 1)\n"
        "        code = 1\n"
        "        try:\n"
        "            with SandboxProvider(settings) as provider:\n"
        "                sandbox = provider.get(provider.acquire(thread))\n"
        "                sandbox.run(f'echo {n} >> log')\n"
        "                os.write(1, (json.dumps([n, sandbox.id]) + '\\n').encode())\n"
        "            code = 0\n"
        "        except BaseException:\n"
        "            import traceback; traceback.print_exc()\n"
        "        os._exit(code)\n"
        "    children.append(pid)\n"
        "os.close(read); os.close(write)\n"  # the end of the pipe starts them all
        "codes = [os.waitpid(pid, 0)[1] for pid in children]\n"
        "assert codes == [0] * 5, codes\n"
    )
    told = finished(fleet, fleet.client_script("five-clients", script, thread, "n1"))
    assert len(told) == 5
    ids = {sandbox_id for _, sandbox_id in told}  # type: ignore[misc]
    assert len(ids) == 1
    assert sorted(fleet.numbers(thread)) == list(range(5))
    (sandbox_id,) = ids
    assert [entry["event"] for entry in fleet.store.story(sandbox_id)].count("reserved") == 1


@pytest.mark.chaos
def test_an_acquire_in_flight_when_the_scheduler_is_killed_succeeds_with_the_next_scheduler(
    fleet: Fleet, broker: redis.Redis
) -> None:
    thread = unique("scheduler-dies")
    assert fleet.scheduler is not None
    answers: Answers[str] = Answers(fleet)
    with fleet.provider() as provider:
        # Frozen, it still takes the request from the queue into its socket, and with its death that is lost.
        fleet.scheduler.send(signal.SIGSTOP)
        try:
            answers.ask("acquire", lambda: provider.acquire(thread))
            digest = Identity(thread).digest
            wait_until(lambda: broker.exists(f"sandfleet:waiting:{digest}"), 10, story=fleet.story)
        finally:
            fleet.scheduler.kill()
            fleet.start_scheduler()
        got = answers.all()
        assert not errors(got)
        sandbox = provider.get(str(got["acquire"]))
        assert sandbox is not None
        assert sandbox.run("echo served").stdout == "served\n"
