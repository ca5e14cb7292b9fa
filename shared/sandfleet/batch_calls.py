"""What a caller collects for `Sandbox.batch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sandfleet import calls
from sandfleet.client import Call

__all__ = ["Batch"]


class Batch:
    """Collects calls for `Sandbox.batch`: same names and arguments as the sandbox' own methods."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout_s: float | None = None,
        session: str | None = None,
    ) -> Batch:
        """Add a command."""
        return self._add(
            calls.execute(
                command,
                cwd=cwd,
                env=env,
                user=None,
                stdin=stdin,
                timeout_s=timeout_s,
                session=session,
                max_output_bytes=None,
                queue_timeout_s=None,
                op_id=None,
            )
        )

    def read_file(self, path: str, start_line: int | None = None, end_line: int | None = None) -> Batch:
        """Add a read; its result is bytes."""
        return self._add(calls.read(path, start_line, end_line))

    def read_text(
        self, path: str, start_line: int | None = None, end_line: int | None = None, *, max_chars: int | None = None
    ) -> Batch:
        """Add a read of text; its result is a `sandfleet.model.TextRead`."""
        return self._add(calls.read_text(path, start_line, end_line, max_chars))

    def write_file(
        self, path: str, content: str | bytes, append: bool = False, *, if_digest: str | None = None
    ) -> Batch:
        """Add a write."""
        return self._add(calls.write(path, content, append, if_digest))

    def str_replace(
        self, path: str, old_str: str, new_str: str, *, replace_all: bool = False, if_digest: str | None = None
    ) -> Batch:
        """Add a text replacement."""
        return self._add(calls.replace_text(path, old_str, new_str, replace_all, if_digest))

    def list_dir(self, path: str, max_depth: int = 2) -> Batch:
        """Add a listing."""
        return self._add(calls.list_call(path, max_depth))

    def _add(self, call: Call) -> Batch:
        self.calls.append(call)
        return self
