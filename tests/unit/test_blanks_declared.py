"""Only backends that start sandboxes ahead of their thread say that they do: a node would try for ever."""

from __future__ import annotations

import pytest

from sandfleet.backends import Capability
from sandfleet.installed_backends import backend_class


@pytest.mark.parametrize(("name", "ahead"), [("docker", True), ("aio", True), ("local", False), ("host", False)])
def test_who_starts_sandboxes_ahead(name: str, ahead: bool) -> None:
    assert (Capability.BLANKS in backend_class(name).capabilities) is ahead
