"""What ``doctor`` says of the place where checkpoints are kept."""

from __future__ import annotations

import threading
from typing import Any

from sandfleet.backends import Finding
from sandfleet.config import Settings
from sandfleet.ids import new_token
from sandfleet.redaction import without_credentials

__all__ = ["checkpoint_storage"]

_WITHIN_S = 10.0


def checkpoint_storage(settings: Settings, *, within_s: float = _WITHIN_S) -> Finding:
    """Whether this machine can write there, read what it wrote, and remove it."""
    label, url = "checkpoints", settings.checkpoint_url or settings.container.persistent_volume
    if not url:
        advice = "set checkpoints.url, or what is on a machine is gone when the machine is"
        return Finding(label, "warn", "no storage: threads' data is on its machine only", advice)
    shown = without_credentials(url).partition("?")[0]
    problems: list[str] = []

    def look() -> None:
        try:
            _use(url, dict(settings.checkpoint_options))
        except ImportError as exc:
            problems.append(f"{exc}: pip install 'sandfleet[checkpoints]', and s3fs, gcsfs or adlfs")
        except Exception as exc:  # noqa: BLE001  (a third party's code; whatever it does is what we report)
            problems.append(without_credentials(f"{type(exc).__name__}: {exc}")[:300])

    # It may hang for ever, and nothing can end it but the process.
    looking = threading.Thread(target=look, name="sandfleet-doctor", daemon=True)
    looking.start()
    looking.join(within_s)
    if looking.is_alive():
        problems.append(f"no answer within {within_s:g} s")
    if problems:
        return Finding(label, "fail", f"{shown}: {problems[0]}", "see checkpoints.url and checkpoints.options")
    return Finding(label, "ok", f"{shown} can be written and read")


def _use(url: str, options: dict[str, Any]) -> None:
    from fsspec.core import url_to_fs  # noqa: PLC0415  (an extra)

    storage, root = url_to_fs(url, skip_instance_cache=True, **options)
    path = f"{str(root).rstrip('/')}/.sandfleet-doctor-{new_token()}"
    if "file" in ({storage.protocol} if isinstance(storage.protocol, str) else set(storage.protocol)):
        storage.makedirs(root, exist_ok=True)
    storage.pipe_file(path, b"x")
    try:
        if storage.cat_file(path) != b"x":
            raise OSError("it gave back something else than was written")
    finally:
        storage.rm_file(path)
