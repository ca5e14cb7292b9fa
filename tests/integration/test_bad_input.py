"""Bad input on a real fleet: each case has its typed error and its code, and nothing hangs or dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.exceptions import NotRegistered

from sandfleet import AsyncSandboxProvider, Batch, Sandbox, SandboxProvider
from sandfleet.celery_app import celery_app
from sandfleet.client import Call
from sandfleet.errors import OperationFailed, SandfleetError
from sandfleet.stack import Stack

WORK = "/mnt/user-data/workspace"
#: Nothing here may take longer, but for what waits for a search's own time limit.
SOON_S = 5.0
TERABYTE = 1024**4


@pytest.fixture(scope="module")
def shared(fleet: Stack) -> Iterator[SandboxProvider]:
    with SandboxProvider(fleet.settings) as made:
        yield made


@pytest.fixture(scope="module")
def held(shared: SandboxProvider) -> Sandbox:
    sandbox = shared.get(shared.acquire("bad-input"))
    assert sandbox is not None
    return sandbox


@pytest.fixture
def sandbox(held: Sandbox, fleet: Stack) -> Iterator[Sandbox]:
    """One sandbox for all cases: after each it still answers, and no process of the fleet has died."""
    yield held
    assert held.run("echo alive").stdout == "alive\n"
    assert held.health().ok
    assert fleet.crashed() == {}


def code_of(call: Callable[[], Any], within_s: float = SOON_S) -> str:
    began = time.monotonic()
    with pytest.raises(SandfleetError) as refused:
        call()
    took_s = time.monotonic() - began
    assert took_s < within_s, f"{took_s:.1f} s"
    assert str(refused.value)
    return refused.value.code


BAD_IDS = ["", "a\n", "\n", "a/b", "../x", "ä", "a b", "a\0", "x" * 65, "thread:1", ".", "a" * 100_000]


@pytest.mark.parametrize("bad", BAD_IDS, ids=lambda bad: ascii(bad[:12]))
def test_an_id_that_is_none_is_refused_by_every_call(shared: SandboxProvider, fleet: Stack, bad: str) -> None:
    assert code_of(lambda: shared.acquire(bad)) == "invalid_argument"
    assert code_of(lambda: shared.acquire("fine", user_id=bad)) == "invalid_argument"
    assert code_of(lambda: shared.upload_to_thread(bad, "f", b"")) == "invalid_argument"
    assert code_of(lambda: shared.list_outputs(bad)) == "invalid_argument"
    assert shared.get(bad) is None
    twin = AsyncSandboxProvider.over(shared)
    assert code_of(lambda: asyncio.run(twin.acquire(bad))) == "invalid_argument"


@pytest.mark.parametrize("bad", [7, b"abc", None, ["a"], {"a": 1}], ids=repr)
def test_an_id_of_the_wrong_type_is_refused(shared: SandboxProvider, bad: Any) -> None:
    if bad is not None:
        assert code_of(lambda: shared.acquire(bad)) == "invalid_argument"
    assert shared.get(bad) is None


PATH_CALLS: dict[str, Callable[[Sandbox, str], Any]] = {
    "read_file": lambda s, p: s.read_file(p),
    "read_text": lambda s, p: s.read_text(p),
    "download_file": lambda s, p: s.download_file(p),
    "write_file": lambda s, p: s.write_file(p, "x"),
    "append": lambda s, p: s.write_file(p, "x", append=True),
    "update_file": lambda s, p: s.update_file(p, b"x"),
    "str_replace": lambda s, p: s.str_replace(p, "a", "b"),
    "list_dir": lambda s, p: s.list_dir(p),
    "glob": lambda s, p: s.glob(p, "*"),
    "grep": lambda s, p: s.grep(p, "x"),
    "stat": lambda s, p: s.stat(p),
    "make_dir": lambda s, p: s.make_dir(p),
    "make_link": lambda s, p: s.make_link(p, "x"),
    "link target": lambda s, p: s.make_link(f"{WORK}/l", p),
    "remove": lambda s, p: s.remove(p),
    "move": lambda s, p: s.move(p, f"{WORK}/x"),
    "move to": lambda s, p: s.move(f"{WORK}/x", p),
    "cwd": lambda s, p: s.run("true", cwd=p),
}


@pytest.mark.parametrize("name", PATH_CALLS)
def test_nul_empty_and_endless_paths_are_refused_everywhere(sandbox: Sandbox, name: str) -> None:
    for path in ("a\0b", "\0", "", "x" * 5000):
        assert code_of(lambda path=path: PATH_CALLS[name](sandbox, path)) == "invalid_argument", path[:10]  # type: ignore[misc]
    if name not in ("link target", "cwd", "move to"):
        assert code_of(lambda: PATH_CALLS[name](sandbox, f"{WORK}/{'n' * 300}")) in (
            "invalid_argument",
            "path_not_found",
        )


def test_dots_stay_inside_the_sandbox_and_mean_what_they_mean_there(sandbox: Sandbox) -> None:
    sandbox.write_file(f"{WORK}/d/../dots", "here")
    assert sandbox.read_file(f"{WORK}/../workspace/dots") == "here"
    assert code_of(lambda: sandbox.read_file("../../../../../../etc/shadow")) in ("path_not_found", "permission_denied")
    assert sandbox.stat("/" + "../" * 50).type == "dir"
    assert {info.name for info in sandbox.list_files("/mnt/user-data/..")} <= {"user-data", "skills", "acp-workspace"}


@pytest.mark.parametrize(
    ("command", "name"),
    [("mkfifo x", "a FIFO"), ("ln -sf /dev/zero x", "a device"), ("ln -sf /dev/stdin x", "stdin"),
     ("python3 -c 'import socket; socket.socket(1).bind(\"x\")'", "a socket")],
    ids=lambda value: value if value.startswith("a") else "",
)  # fmt: skip
def test_what_is_no_file_is_refused_at_once(sandbox: Sandbox, command: str, name: str) -> None:
    sandbox.run(f"rm -rf x; {command}").check()
    for call in ("read_file", "read_text", "download_file", "write_file", "append", "update_file", "str_replace"):
        code = code_of(lambda call=call: PATH_CALLS[call](sandbox, f"{WORK}/x"))  # type: ignore[misc]
        assert code in ("not_regular_file", "permission_denied"), (name, call)
    assert sandbox.grep(WORK, "never in here")[0] == []
    assert f"{WORK}/x" in sandbox.glob(WORK, "x")[0]
    assert sandbox.stat(f"{WORK}/x").type == "other"
    assert code_of(lambda: sandbox.grep(f"{WORK}/x", "a")) in ("not_regular_file", "permission_denied")
    sandbox.remove(f"{WORK}/x")


def test_a_file_of_a_terabyte_costs_nobody_anything(sandbox: Sandbox) -> None:
    sandbox.run(f"rm -rf *; truncate -s {TERABYTE} zeros; printf 'a line\\n%.0s' $(seq 20000) > text").check()
    sandbox.run(f"truncate -s {TERABYTE} text; ls").check()
    large = f"{WORK}/zeros"
    assert sandbox.stat(large).size == TERABYTE
    assert code_of(lambda: sandbox.read_file(large)) == "file_too_large"
    assert code_of(lambda: sandbox.download_file(large)) == "file_too_large"
    assert code_of(lambda: sandbox.str_replace(large, "a", "b")) == "file_too_large"
    assert code_of(lambda: sandbox.read_text(large)) == "binary_file"
    head = sandbox.read_text(f"{WORK}/text", max_chars=100)
    assert (head.text, head.truncated, head.total_lines, head.digest) == ("a line\n" * 14, True, None, None)
    assert sandbox.read_text(f"{WORK}/text", 15000, 15001).text == "a line\n" * 2
    assert sandbox.read_file(f"{WORK}/text", 2, 3) == "a line\n" * 2
    assert sandbox.grep(WORK, "a line") == ([], False)
    assert sandbox.glob(WORK, "z*") == ([large], False)
    assert (sandbox.metrics().disk_bytes or 0) < 10**9
    sandbox.run("rm -f zeros text").check()


@pytest.mark.slow
def test_a_line_a_terabyte_away_is_not_waited_for(sandbox: Sandbox) -> None:
    sandbox.run(f"echo a > far; truncate -s 100 far; head -c 9000 /dev/zero | tr '\\0' x > far; "
                f"truncate -s {TERABYTE} far").check()  # fmt: skip
    assert code_of(lambda: sandbox.read_text(f"{WORK}/far", 2), 30.0) == "search_timeout"
    sandbox.run("rm -f far").check()


@pytest.mark.slow
def test_expressions_that_explode_end_at_their_time_and_the_node_serves_on(sandbox: Sandbox) -> None:
    sandbox.write_file(f"{WORK}/bomb/text", "a" * 1900 + "\n")
    sandbox.write_file(f"{WORK}/bomb/" + "a" * 200, "")
    grep = Call("grep", {"path": f"{WORK}/bomb", "pattern": "(a+)+b", "timeout_s": 1.0})
    glob = Call("glob", {"path": f"{WORK}/bomb", "pattern": "*a" * 60 + "b", "timeout_s": 1.0})
    for call in (grep, glob):
        assert code_of(lambda call=call: sandbox._call(call), 4.0) == "search_timeout"  # type: ignore[misc]
    assert sandbox.read_file(f"{WORK}/bomb/text", 1, 1)
    sandbox.remove(f"{WORK}/bomb", recursive=True)


@pytest.mark.parametrize(
    "pattern", ["(", "[", "*", "(?P<n>", "a{99999999999}", "(?<=a+)b", "\\", "(" * 5000], ids=ascii
)
def test_a_pattern_that_is_none_is_told(sandbox: Sandbox, pattern: str) -> None:
    assert code_of(lambda: sandbox.grep(WORK, pattern)) == "invalid_pattern"


@pytest.mark.parametrize("pattern", ["/etc/*", "../*", "a/../b", "*\0"], ids=ascii)
def test_a_glob_that_leads_out_is_told(sandbox: Sandbox, pattern: str) -> None:
    assert code_of(lambda: sandbox.glob(WORK, pattern)) == "invalid_pattern"
    assert code_of(lambda: sandbox.grep(WORK, "x", glob=pattern)) == "invalid_pattern"


def test_read_only_places_refuse_writes_as_the_kernel_does(sandbox: Sandbox) -> None:
    codes = {name: code_of(lambda name=name: PATH_CALLS[name](sandbox, "/usr/bin/x"))  # type: ignore[misc]
             for name in ("write_file", "append", "make_dir", "make_link")}  # fmt: skip
    assert set(codes.values()) <= {"read_only", "permission_denied"}
    with pytest.raises(OSError) as refused:
        sandbox.write_file("/usr/x", "y")
    assert refused.value.errno in (13, 30)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda s: s.run([]), "invalid_argument"),
        (lambda s: s.run("a\0b"), "invalid_argument"),
        (lambda s: s.run(["a", "b\0"]), "invalid_argument"),
        (lambda s: s.run("true", env={"A=B": "x"}), "invalid_argument"),
        (lambda s: s.run("true", env={"A\n": "x"}), "invalid_argument"),
        (lambda s: s.run("true", env={"A": "x\0"}), "invalid_argument"),
        (lambda s: s.run("true", env={"A": 1}), "invalid_argument"),
        (lambda s: s.run("true", timeout_s=0), "invalid_argument"),
        (lambda s: s.run("true", timeout_s=-1), "invalid_argument"),
        (lambda s: s.run("true", timeout_s=float("nan")), "invalid_argument"),
        (lambda s: s.run("true", timeout_s=float("inf")), "invalid_argument"),
        (lambda s: s.run("true", timeout_s=1e9), "invalid_argument"),
        (lambda s: s.run("true", session="a/b"), "invalid_argument"),
        (lambda s: s.run("true", session="a\n"), "invalid_argument"),
        (lambda s: s.run("true", max_output_bytes=-1), "invalid_argument"),
        (lambda s: s.run("true", max_output_bytes=10**12), "invalid_argument"),
        (lambda s: s.run("true", op_id="a b"), "invalid_argument"),
        (lambda s: s.run(["true", "x" * 200_000]), "invalid_argument"),
        (lambda s: s.run(["true", *["x" * 100_000] * 50]), "invalid_argument"),
        (lambda s: s.read_file("a", 0), "invalid_argument"),
        (lambda s: s.read_file("a", "1"), "invalid_argument"),
        (lambda s: s.read_file("a", True), "invalid_argument"),
        (lambda s: s.read_file(7), "invalid_argument"),
        (lambda s: s.read_text("a", 3, 2), "invalid_argument"),
        (lambda s: s.read_text("a", max_chars=0), "invalid_argument"),
        (lambda s: s.str_replace("a", "", "b"), "invalid_argument"),
        (lambda s: s.list_dir("a", 0), "invalid_argument"),
        (lambda s: s.list_dir("a", 10**9), "invalid_argument"),
        (lambda s: s.glob(".", ""), "invalid_argument"),
        (lambda s: s.glob(".", "x" * 2000), "invalid_argument"),
        (lambda s: s.grep(".", ""), "invalid_argument"),
        (lambda s: s.grep(".", "x" * 20_000), "invalid_argument"),
        (lambda s: s.grep(".", "x", max_results=0), "invalid_argument"),
        (lambda s: s.write_file("f", "x", if_digest="y" * 1000), "invalid_argument"),
        (lambda s: s.update_file("f", b"x" * (101 * 1024 * 1024)), "invalid_argument"),
        (lambda s: s.batch(Batch()), "invalid_argument"),
        (lambda s: s._call(Call("no_such_thing", {})), "unknown_operation"),
        (lambda s: s._call(Call("stat", {"path": "a", "colour": "red"})), "invalid_argument"),
        (lambda s: s._call(Call("batch", {"ops": [{"kind": "batch", "args": {"ops": []}}]})), "invalid_argument"),
    ],
)  # fmt: skip
def test_an_argument_that_is_none_is_told_by_name(sandbox: Sandbox, call: Callable[[Sandbox], Any], code: str) -> None:
    assert code_of(lambda: call(sandbox)) == code


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
def test_the_same_over_plain_celery(fleet: Stack, sandbox: Sandbox) -> None:
    app = celery_app(fleet.settings)
    try:
        for task, args, code in (
            ("sandbox.stat", {"path": "a\0"}, "invalid_argument"),
            ("sandbox.stat", {"path": 7}, "invalid_argument"),
            ("sandbox.stat", {}, "invalid_argument"),
            ("sandbox.execute_command", {"command": "true", "colour": "red"}, "invalid_argument"),
            ("sandbox.execute_command", {"command": ["true"]}, "invalid_argument"),
            ("sandbox.grep", {"path": WORK, "pattern": "("}, "invalid_pattern"),
            ("sandbox.read_file", {"path": f"{WORK}/none", "as_text": True}, "path_not_found"),
        ):
            for thread in ("bad-input", "bad\ninput") if task == "sandbox.stat" and args else ("bad-input",):
                result = app.send_task(task, kwargs={"thread_id": thread, **args})
                with pytest.raises(OperationFailed) as failed:
                    result.get(timeout=SOON_S * 2)
                assert failed.value.error.code == ("invalid_argument" if "\n" in thread else code), (task, args)
        # A task nobody registered is refused by Celery itself, and the caller hears it.
        with pytest.raises(NotRegistered, match="no_such_thing"):
            app.send_task("sandbox.no_such_thing", kwargs={"thread_id": "bad-input"}).get(timeout=SOON_S * 2)
    finally:
        app.backend.remove_pending_result = lambda result: result
        app.close()
