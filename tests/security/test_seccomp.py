"""The filter that every sandboxd puts on itself, beside the engine's: nothing in the sandbox is without it."""

from __future__ import annotations

import pytest

from tests.security.boxes import Box

#: Harmless where it is allowed.
CALLS = """
import fcntl
with open("mine", "w") as file:
    for name, request in {"project": 0x401C5820, "flags": 0x40086602}.items():
        try:
            print(name, fcntl.ioctl(file, request, bytes(28)))
        except OSError as exc:
            print(name, "refused" if exc.errno == 1 else exc)
"""


def test_R4_no_file_leaves_its_threads_quota(box: Box) -> None:
    told = dict(line.split(" ", 1) for line in box.python(CALLS).splitlines())
    assert told == {"project": "refused", "flags": "refused"}


@pytest.mark.parametrize("session", [None, "shell"])
def test_E5_no_process_is_without_the_filter(box: Box, session: str | None) -> None:
    told = box.run("grep -h ^Seccomp: /proc/self/status /proc/1/status", session=session)
    assert told.split() == ["Seccomp:", "2", "Seccomp:", "2"], told
