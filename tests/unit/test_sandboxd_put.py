"""A large file that is replaced: its end may wait for the disk, the answer does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandfleet_workers.sandboxd import sandboxd


def still_open(path: Path) -> bool:
    """Whether this process holds a removed file of that name."""
    held = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return f"{path} (deleted)" in [os.readlink(each) for each in held if os.path.lexists(each)]


@pytest.mark.parametrize("there", [True, False])
def test_a_replaced_file_is_given_up_after_the_answer(tmp_path: Path, there: bool) -> None:
    path, content = tmp_path / "file", bytes(sandboxd.READ_SIZE + 1)
    if there:
        path.write_bytes(b"before")
    held: list[bool] = []

    def work(_request: Any, _path: str, _heavy: bool, write: Callable[[], Any], _timeout_s: float | None) -> None:
        write()
        held.append(still_open(path))

    request = SimpleNamespace(params=lambda: sandboxd.Args({"path": str(path)}), body=content)
    server = SimpleNamespace(path=lambda text: text, work=work, repeats=lambda _request, _args: False)
    sandboxd.Server.put_file(server, request)  # type: ignore[arg-type]
    assert path.read_bytes() == content
    assert held == [there]
    assert not still_open(path)
