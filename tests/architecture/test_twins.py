"""`Sandbox` and `AsyncSandbox`, `SandboxProvider` and `AsyncSandboxProvider`: one surface, awaited or not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from sandfleet import AsyncSandbox, AsyncSandboxProvider, Sandbox, SandboxProvider
from sandfleet.checkpointing import AsyncCheckpointing, Checkpointing

TWINS = [(Sandbox, AsyncSandbox), (SandboxProvider, AsyncSandboxProvider), (Checkpointing, AsyncCheckpointing)]
#: What one of them has alone, with the reason.
ALONE = {
    "over",  # the async side of a sync provider
    "spec", "settings",  # attributes or properties
    "uses_thread_data_mounts", "needs_upload_permission_adjustment",  # DeerFlow asks the class
}  # fmt: skip
#: Without I/O, hence nothing to wait for.
PLAIN = {"get", "reset", "id", "sandbox_id", "job", "output"}


def surface(kind: type) -> dict[str, Any]:
    found = {name: found for part in reversed(kind.__mro__[:-1]) for name, found in vars(part).items()}
    return {name: method for name, method in found.items() if not name.startswith("_") and name not in ALONE}


@pytest.mark.parametrize(("sync", "twin"), TWINS, ids=lambda kind: kind.__name__)
def test_both_have_the_same_methods_with_the_same_arguments(sync: type, twin: type) -> None:
    assert set(surface(sync)) == set(surface(twin))
    for name, method in surface(sync).items():
        if isinstance(method, property):
            continue
        ours, theirs = inspect.signature(method), inspect.signature(surface(twin)[name])
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), name
        told = [str(signature.return_annotation).replace("Async", "") for signature in (ours, theirs)]
        assert told[0] == told[1], name


@pytest.mark.parametrize(("sync", "twin"), TWINS, ids=lambda kind: kind.__name__)
def test_all_that_does_io_is_awaited(sync: type, twin: type) -> None:
    waits = {name for name, method in surface(twin).items() if inspect.iscoroutinefunction(method)}
    assert waits == set(surface(sync)) - PLAIN
    assert not any(inspect.iscoroutinefunction(method) for method in surface(sync).values())
