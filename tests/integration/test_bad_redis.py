"""A Redis that is away, full, or refuses the password: typed errors in bounded time, and the node lives on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis

from sandfleet import AsyncSandboxProvider, Sandbox, SandboxProvider
from sandfleet.errors import SandfleetError, StoreUnavailable
from sandfleet.stack import Stack
from tests.services import require, wait_until

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

#: What a caller allows an operation to wait; a Redis that is away is sat out for no longer.
PATIENCE_S = 3.0


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    require("redis")
    with Stack(nodes=1, backend="mock", lease_s=3.0, durable=True, queue_timeout_s=PATIENCE_S) as running:
        yield running


@pytest.fixture
def known(stack: Stack) -> Iterator[tuple[SandboxProvider, Sandbox]]:
    """A client that worked before the trouble came, and its sandbox."""
    with SandboxProvider(stack.settings) as provider:
        sandbox = provider.get(provider.acquire("known"))
        assert sandbox is not None
        assert sandbox.run("true").ok
        yield provider, sandbox


def reasons(calls: list[Callable[[], Any]], within_s: float) -> set[str]:
    """What each call was refused for; each within the time."""
    found = set()
    for call in calls:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable) as refused:
            call()
        assert time.monotonic() - began < within_s
        assert refused.value.retryable
        found.add(str(refused.value.facts["reason"]))
    return found


def asynchronous(stack: Stack, url: str | None = None) -> Callable[[], Any]:
    """The same of a fresh asynchronous client."""

    async def use() -> None:
        settings = stack.settings if url is None else stack.settings.model_copy(update={"redis_url": url})
        await AsyncSandboxProvider(settings).acquire("stranger", timeout_s=PATIENCE_S)

    return lambda: asyncio.run(use())


def with_password(stack: Stack, password: str | None) -> str:
    parts = urlsplit(stack.settings.redis_url)
    host = (parts.hostname or "") + (f":{parts.port}" if parts.port else "")
    return urlunsplit(parts._replace(netloc=host if password is None else f":{password}@{host}"))


@pytest.mark.parametrize("password", ["wrong", None], ids=["wrong password", "no password"])
def test_refused_credentials_are_told_at_once_and_not_shown(stack: Stack, password: str | None) -> None:
    url = with_password(stack, password)
    provider = SandboxProvider(stack.settings.model_copy(update={"redis_url": url}))
    calls = [
        lambda: provider.acquire("stranger", timeout_s=PATIENCE_S),
        lambda: provider.list(),
        lambda: provider.get("0123456789abcdef").run("true"),  # type: ignore[union-attr]
        asynchronous(stack, url),
    ]
    assert reasons(calls, 2.0) == {"auth"}
    with pytest.raises(StoreUnavailable) as refused:
        provider.list()
    assert "wrong" not in str(refused.value).replace("WRONGPASS", "")


def recovers(stack: Stack, sandbox: Sandbox) -> None:
    """The node is the one it was, the sandbox too, and it works."""

    def works() -> bool:
        try:
            return sandbox.run("true").ok
        except SandfleetError as exc:
            raise AssertionError(repr(exc)) from exc

    wait_until(works, 20, story=lambda: stack.tail("node-1", 40))
    assert stack.crashed() == {}


def test_a_redis_that_is_away_is_told_within_the_callers_patience(
    stack: Stack, known: tuple[SandboxProvider, Sandbox]
) -> None:
    provider, sandbox = known
    stack.kill_redis()
    try:
        fresh = SandboxProvider(stack.settings)
        quick = [lambda: fresh.acquire("stranger", timeout_s=PATIENCE_S), lambda: fresh.list(), asynchronous(stack)]
        patient = [
            lambda: sandbox.run("true"),
            lambda: sandbox.write_file("f", "x" * 1_000_000),
            lambda: provider.acquire("known", timeout_s=PATIENCE_S),
        ]
        assert reasons(quick, PATIENCE_S + 5) | reasons(patient, PATIENCE_S + 5) <= {"refused", "connection"}
    finally:
        stack.start_redis()
    recovers(stack, sandbox)


def test_a_full_redis_is_told_and_the_node_survives_it(stack: Stack, known: tuple[SandboxProvider, Sandbox]) -> None:
    provider, sandbox = known
    node = {view.node_id: view.incarnation for view in stack.store.nodes()}
    with redis.Redis.from_url(stack.settings.redis_url) as operator:
        operator.config_set("maxmemory-policy", "noeviction")
        operator.config_set("maxmemory", "1")
        try:
            calls = [
                lambda: sandbox.run("true"),
                lambda: provider.acquire("another", timeout_s=PATIENCE_S),
                asynchronous(stack),
            ]
            assert reasons(calls, PATIENCE_S + 5) == {"full"}
        finally:
            operator.config_set("maxmemory", "0")
    recovers(stack, sandbox)
    # A node that could not renew its lease for longer than it lasts may come back as a new incarnation.
    wait_until(lambda: {view.node_id for view in stack.store.nodes() if view.alive} == set(node), 15)
    assert provider.get(provider.acquire("known")).run("true").ok  # type: ignore[union-attr]
