"""A person's terminal in a container, and the node killed under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sandfleet.stack import Stack
from tests.integration.test_cli_shell import Terminal
from tests.services import require

pytestmark = [pytest.mark.docker, pytest.mark.chaos]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """One node whose containers outlive it."""
    require("docker")
    require("redis")
    monkeypatch.setenv("SANDFLEET_BACKEND", "docker")
    with Stack(1, backend="docker", lease_s=5.0, detach_s=30.0, blank_pool=0, replicas=2) as running:
        yield running


@pytest.fixture
def terminal(stack: Stack) -> Iterator[Terminal]:
    opened = Terminal(stack.settings.redis_url, "--thread", "shell")
    yield opened
    opened.close()


@pytest.mark.parametrize("ends", [Stack.kill_node, Stack.stop_node], ids=["kill -9", "SIGTERM"])
def test_a_terminal_goes_on_though_its_node_is_restarted_under_it(
    stack: Stack, terminal: Terminal, ends: Callable[[Stack, str], None]
) -> None:
    terminal.type(b"PS1='ready> '; kept=42\r")
    terminal.shows(rb"\nready> ")
    ends(stack, "node-1")
    stack.start_node("node-1")
    terminal.type(b"echo kept-$kept; exit 5\r")
    terminal.shows(rb"\nkept-42\r")
    assert terminal.ends() == 5
    assert terminal.is_as_before()
