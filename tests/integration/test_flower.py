"""Flower as a person sees it: in a browser, with a password, tasks that can be read."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

from sandfleet import SandboxProvider
from sandfleet.errors import ConfigError, PathNotFound
from sandfleet.stack import Stack
from tests.architecture.repository import ROOT
from tests.browser import Browser
from tests.services import free_port, require, wait_until

pytestmark = pytest.mark.slow

SECRET = "hunter2-of-the-test"
_SANDFLEET = [sys.executable, "-c", "import sys; from sandfleet.cli import main; sys.exit(main())"]
_LISTEN = """
import socket, sys
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def watched() -> Iterator[Stack]:
    """A fleet with Flower: two nodes with local sandboxes."""
    require("redis")
    require("bwrap")
    with Stack(2, backend="local", lease_s=3.0, flower_port=0) as stack:
        yield stack


def url(stack: Stack, path: str = "/") -> str:
    return f"http://127.0.0.1:{stack.flower_port}{path}"


def get(stack: Stack, path: str, password: str | None = None) -> str:
    """A page of Flower, by a client that knows the password (or gives another one)."""
    settings = stack.settings
    login = f"{settings.flower_user}:{settings.flower_password if password is None else password}"
    headers = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
    with urllib.request.urlopen(urllib.request.Request(url(stack, path), headers=headers), timeout=10) as answer:
        return str(answer.read().decode())


def tasks(stack: Stack, name: str, state: str | None = None) -> list[dict[str, Any]]:
    """What Flower knows of tasks of a name, latest first."""
    found = json.loads(get(stack, "/api/tasks")).values()
    return [task for task in found if task["name"] == name and state in (None, task["state"])]


def refusal(stack: Stack, path: str, password: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(stack, path, password)
    refused.value.close()
    return refused.value.code


@pytest.mark.timeout(120)
def test_a_person_logs_in_and_finds_a_running_command_of_a_thread_and_later_its_runtime(
    watched: Stack, tmp_path: Path
) -> None:
    require("chromium")
    settings = watched.settings
    with (
        SandboxProvider(settings) as provider,
        ThreadPoolExecutor(1) as pool,
        Browser(tmp_path / "browser", user=settings.flower_user, password=settings.flower_password) as browser,
    ):
        sandbox = provider.get(provider.acquire("alice-of-the-browser"))
        assert sandbox is not None
        future = pool.submit(sandbox.run, "sleep 6; echo done")
        assert browser.go(url(watched, "/tasks")) == 200
        browser.type_into("input[type=search]", "alice-of-the-browser")
        row = wait_until(lambda: _row_of(browser, "sandbox.execute_command"), 5, story=browser.text)
        assert "STARTED" in row
        assert f"bash: sleep 6; echo done · {sandbox.id}" in row
        assert "thread alice-of-the-browser" in row
        info = watched.store.sandbox(sandbox.id)
        assert info is not None
        assert f"{info.node_id}@" in row
        kept = browser.screenshot(tmp_path / "flower-running.png")
        assert kept.stat().st_size > 10_000

        assert future.result(timeout=30).stdout == "done\n"
        wait_until(lambda: tasks(watched, "sandbox.execute_command", "SUCCESS"), 5)
        assert browser.go(url(watched, "/tasks")) == 200
        browser.type_into("input[type=search]", "alice-of-the-browser")
        row = wait_until(lambda: "SUCCESS" in (row := _row_of(browser, "sandbox.execute_command")) and row, 5)
        assert "exit 0" in row
        runtime_s = float(tasks(watched, "sandbox.execute_command", "SUCCESS")[0]["runtime"])
        assert 6.0 <= runtime_s < 8.0
        assert f"{runtime_s:.1f}" in row
        browser.screenshot(tmp_path / "flower-done.png")
        for picture in ("flower-running.png", "flower-done.png"):
            (ROOT / "build").mkdir(exist_ok=True)
            shutil.copy(tmp_path / picture, ROOT / "build" / picture)


def _row_of(browser: Browser, name: str) -> str:
    """The text of the first row of the table that names a task."""
    rows = browser.ask("[...document.querySelectorAll('table tbody tr')].map(row => row.innerText)")
    return next((str(row) for row in rows if name in row), "")


def test_a_browser_with_the_wrong_password_sees_nothing(watched: Stack, tmp_path: Path) -> None:
    require("chromium")
    with Browser(tmp_path / "browser", user=watched.settings.flower_user, password="wrong") as browser:
        assert browser.go(url(watched, "/tasks")) == 401
        assert browser.text() in ("", "Access denied")


def test_every_page_wants_the_password(watched: Stack) -> None:
    for path in ("/", "/workers", "/tasks", "/broker", "/api/tasks", "/api/workers", "/worker/node-1"):
        assert refusal(watched, path, "wrong") == 401
    assert "node-1@" in get(watched, "/workers")


def test_a_failed_operation_is_a_failure_with_a_message_for_people(watched: Stack) -> None:
    with SandboxProvider(watched.settings) as provider:
        sandbox = provider.get(provider.acquire("bob"))
        assert sandbox is not None
        with pytest.raises(PathNotFound):
            sandbox.read_file("/mnt/user-data/workspace/none")
    [task] = wait_until(lambda: tasks(watched, "sandbox.read_file", "FAILURE"), 5)
    assert task["exception"].startswith("path_not_found: ")
    assert "{" not in task["exception"]
    assert not task["traceback"]
    assert task["args"] == f"read: /mnt/user-data/workspace/none · {sandbox.id}"


def test_no_page_shows_a_secret_an_environment_value_or_what_was_written(watched: Stack) -> None:
    """Neither of the SDK's operations nor of a plain caller's, whose own Celery shows all arguments."""
    bare = Celery(broker=watched.settings.redis_url, backend=watched.settings.redis_url, set_as_current=False)
    with SandboxProvider(watched.settings) as provider, ThreadPoolExecutor(2) as pool:
        sandbox = provider.get(provider.acquire("carol"))
        assert sandbox is not None
        command = f"API_TOKEN={SECRET} sleep 4"
        running = pool.submit(sandbox.run, command, env={"KEY": SECRET})
        sandbox.write_file("/mnt/user-data/workspace/secret", SECRET)
        plain = bare.send_task(
            "sandbox.execute_command",
            kwargs={"thread_id": "carol", "command": f"echo {'x' * 50}; sleep 4", "env": {"KEY": SECRET}},
            queue="sandfleet.ops",
        )
        [held] = wait_until(
            lambda: [task for task in tasks(watched, "sandbox.execute_command") if task["uuid"] == plain.id], 5
        )
        assert held["kwargs"] == "thread carol"
        _no_page_has_a_secret(watched)
        assert running.result(timeout=20).exit_code == 0
        assert plain.get(timeout=20)["exit_code"] == 0
        done = wait_until(
            lambda: [task for task in tasks(watched, "sandbox.execute_command", "SUCCESS") if task["uuid"] == plain.id],
            5,
        )
        assert done[0]["result"] == "exit 0"
        assert done[0]["args"].startswith("bash: echo xxx")
        assert 4.0 <= done[0]["runtime"] < 8.0
        _no_page_has_a_secret(watched)
    bare.close()


def _no_page_has_a_secret(stack: Stack) -> None:
    password = stack.settings.redis_url.partition("@")[0].rpartition(":")[2]
    workers = [task["worker"] for task in json.loads(get(stack, "/api/tasks")).values()]
    pages = ["/", "/tasks", "/broker", "/api/tasks", "/api/workers?refresh=1"]
    pages += [f"/worker/{worker}" for worker in sorted({worker for worker in workers if worker})]
    pages += [f"/task/{uuid}" for uuid in json.loads(get(stack, "/api/tasks"))]
    for page in pages:
        text = get(stack, page)
        for secret in (SECRET, password, stack.settings.flower_password):
            assert secret not in text, f"{page} shows a secret"


def test_neither_password_is_in_a_process_list_and_no_role_knows_flowers(watched: Stack) -> None:
    settings = watched.settings
    redis_password = settings.redis_url.partition("@")[0].rpartition(":")[2]
    for process in psutil.Process().children(recursive=True):
        line = " ".join(process.cmdline())
        assert redis_password not in line
        assert settings.flower_password not in line
    for process_of_a_role in (watched.scheduler, *watched.nodes.values()):
        environ = psutil.Process(process_of_a_role.pid).environ()
        assert settings.flower_password not in "\n".join(environ.values())


def test_flower_is_on_loopback_only(watched: Stack) -> None:
    listening = {
        connection.laddr.ip
        for process in psutil.Process().children(recursive=True)
        if "sandfleet.flower" in process.cmdline()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_a_port_that_is_taken_is_told_before_anything_is_missed() -> None:
    require("redis")
    blocker = subprocess.Popen(
        [sys.executable, "-c", _LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert blocker.stdout is not None
        port = int(blocker.stdout.readline())
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            Stack(0, backend="mock", flower_port=port).start()
    finally:
        blocker.communicate("")


def test_the_flower_command_tells_a_new_password_once_and_serves_the_fleet(watched: Stack, tmp_path: Path) -> None:
    """Whatever lies in its directory, and whatever the environment says of who may log in and where."""
    (tmp_path / "flowerconfig.py").write_text("raise SystemExit('somebody else wrote this')")
    others = {"FLOWER_BASIC_AUTH": "mallory:x", "FLOWER_ADDRESS": "0.0.0.0", "FLOWER_READ_ONLY": "true"}
    port = free_port()
    told = tmp_path / "told"
    with told.open("w") as out:
        process = subprocess.Popen(
            [*_SANDFLEET, "flower", "--port", str(port)],
            env={**os.environ, "SANDFLEET_REDIS_URL": watched.settings.redis_url, **others},
            stdout=out,
            stderr=out,
            cwd=tmp_path,
        )
    try:
        password = wait_until(
            lambda: next((line.split()[-1] for line in told.read_text().splitlines() if "told this once" in line), ""),
            15,
        )
        login = base64.b64encode(f"sandfleet:{password}".encode()).decode()
        page = f"http://127.0.0.1:{port}/workers"
        request = urllib.request.Request(page, headers={"Authorization": f"Basic {login}"})

        def served() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    return "node-1@" in answer.read().decode()
            except urllib.error.URLError:
                return False

        wait_until(served, 20, story=told.read_text)
        assert password not in " ".join(psutil.Process(process.pid).cmdline())
        assert told.read_text().count(password) == 1
        listening = psutil.Process(process.pid).net_connections("tcp")
        assert {found.laddr.ip for found in listening if found.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        for headers in ({"Authorization": "Basic " + base64.b64encode(b"mallory:x").decode()}, {}):
            assert _code(urllib.request.Request(page, headers=headers)) == 401
        order = f"http://127.0.0.1:{port}/api/task/send-task/sandbox.execute_command"
        headers = {"Authorization": f"Basic {login}"}
        assert _code(urllib.request.Request(order, data=b"{}", headers=headers)) in (403, 405), "it may only be read"
    finally:
        process.terminate()
        assert process.wait(15) == 0


def test_the_flower_command_says_why_it_cannot_listen(watched: Stack) -> None:
    """Without the traceback that Flower would print."""
    for where, why in (
        (["--port", str(watched.flower_port)], f"port {watched.flower_port} is taken"),
        (["--address", "192.0.2.1", "--port", str(free_port())], "cannot listen on 192.0.2.1"),
    ):
        done = subprocess.run(
            [*_SANDFLEET, "flower", *where],
            env={**os.environ, "SANDFLEET_REDIS_URL": watched.settings.redis_url},
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 2
        assert why in done.stderr
        assert "Traceback" not in done.stderr


def _code(request: urllib.request.Request) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=5).close()
    refused.value.close()
    return refused.value.code


def test_up_with_flower_tells_where_it_is_and_a_new_password_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("redis")
    run_root = Path(tempfile.mkdtemp(prefix="sf-"))
    for name in ("REDIS_URL", "SANDFLEET_REDIS_URL", "SANDFLEET_FLOWER_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SANDFLEET_RUN_ROOT", str(run_root))
    options = ["up", "--json", "--backend", "mock", "--data-root", str(run_root / "data"), "--flower"]
    up = subprocess.Popen(
        [*_SANDFLEET, *options, "--flower-port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert up.stdout is not None
        facts = json.loads("".join(iter(up.stdout.readline, "}\n")) + "}")
        login = base64.b64encode(f"{facts['flower_user']}:{facts['flower_password']}".encode()).decode()
        page = urllib.request.Request(facts["flower_url"] + "workers", headers={"Authorization": f"Basic {login}"})
        with urllib.request.urlopen(page, timeout=10) as answer:
            assert "node-1@" in answer.read().decode()
        assert facts["flower_password"] not in (run_root / "up.json").read_text(), "it is told once"
        children = psutil.Process(up.pid).children(recursive=True)
        assert len(children) == 4
    finally:
        up.send_signal(signal.SIGTERM)
        _, err = up.communicate(timeout=30)
        shutil.rmtree(run_root, ignore_errors=True)
    assert up.returncode == 0, err
    assert not [child for child in children if child.is_running()]
