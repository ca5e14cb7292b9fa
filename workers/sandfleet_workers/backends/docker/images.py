"""Having an image on the engine: pulled as the policy says, each at most once at a time."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import docker.auth
import docker.errors

from sandfleet.config.models import ContainerSettings
from sandfleet.errors import ConfigError, StartFailed
from sandfleet_workers.backends.docker.engine import TROUBLE, Engine
from sandfleet_workers.backends.docker.failures import pull_failure

__all__ = ["Images"]

log = logging.getLogger("sandfleet.node")

#: How long an image's id is believed; after that a new image under the same name is noticed.
_FRESH_S = 15.0


class Images:
    """The images of one node. Thread-safe.

    Args:
        engine: Where they are.
        container: Pull policy and credentials.

    Raises:
        ConfigError: ``registry_config`` cannot be used.
    """

    def __init__(self, engine: Engine, container: ContainerSettings) -> None:
        self._engine = engine
        self._policy = container.image_pull_policy
        self._credentials = _credentials(container.registry_config)
        self._lock = threading.Lock()
        self._pulling: dict[str, threading.Lock] = {}
        self._looking = threading.Lock()
        #: Name → (id, when it was looked up, of the monotonic clock).
        self._known: dict[str, tuple[str, float]] = {}

    def ensure(self, image: str) -> str:
        """The image's id, after pulling it where the policy says so.

        Raises:
            StartFailed: ``reason`` no_image, pull_denied, disk… when it cannot be had.
        """
        asked_at = time.monotonic()
        if self._policy != "Always" and (found := self.id_of(image)):
            return found
        if self._policy == "Never":
            with self._engine.calls("look for the image", image=image):
                return str(self._engine.api.inspect_image(image)["Id"])  # type: ignore[no-untyped-call]
        with self._lock:
            pulling = self._pulling.setdefault(image, threading.Lock())
        with pulling:
            known = self._known.get(image)
            if known is not None and known[1] >= asked_at:
                return known[0]  # somebody else pulled it while we waited
            self._pull(image)
            return self._look(image) or self._missing(image)

    def id_of(self, image: str) -> str:
        """The id of the image if the engine has it, else nothing. Asked of the engine every few seconds at most, by one
        at a time; while it does not answer, what it said last counts, for nobody needs it to use what runs already.

        Raises:
            StartFailed: The engine does not answer and never has.
        """
        known = self._known.get(image)
        if known is None:
            return self._look(image)
        if known[1] > time.monotonic() - _FRESH_S or not self._looking.acquire(blocking=False):
            return known[0]
        try:
            return self._look(image, quickly=True)
        except StartFailed as exc:
            log.warning("image.not_looked_at", extra={"image": image, "error": str(exc)})
            self._known[image] = (known[0], time.monotonic())
            return known[0]
        finally:
            self._looking.release()

    def look(self, image: str) -> str:
        """The image's id as the engine has it now; nothing when it has none.

        Raises:
            StartFailed: The engine does not answer.
        """
        return self._look(image, quickly=True)

    def forget(self, image: str) -> None:
        """Its id is not what was thought."""
        self._known.pop(image, None)

    def _look(self, image: str, *, quickly: bool = False) -> str:
        api = self._engine.quick_api if quickly else self._engine.api
        with self._engine.calls("look for the image", image=image):
            try:
                found = str(api.inspect_image(image)["Id"])  # type: ignore[no-untyped-call]
            except docker.errors.NotFound:
                self._known.pop(image, None)
                return ""
        self._known[image] = (found, time.monotonic())
        return found

    def _missing(self, image: str) -> str:
        raise pull_failure(image, "the registry gave another one")

    def _pull(self, image: str) -> None:
        log.info("image.pulling", extra={"image": image})
        began = time.monotonic()
        try:
            for line in self._engine.api.pull(image, stream=True, decode=True, auth_config=self._auth(image)):
                if isinstance(line, dict) and line.get("error"):
                    raise pull_failure(image, str(line["error"])[:500])
        except docker.errors.APIError as exc:
            raise pull_failure(image, str(exc.explanation or exc)[:500]) from exc
        except TROUBLE as exc:
            with self._engine.calls(f"pull {image}"):
                raise exc
        log.info("image.pulled", extra={"image": image, "took_s": round(time.monotonic() - began, 1)})

    def _auth(self, image: str) -> dict[str, Any] | None:
        """The registry's credentials. None lets the SDK look where Docker's own command line would."""
        if self._credentials is None:
            return None
        registry, _ = docker.auth.resolve_repository_name(image)
        return docker.auth.resolve_authconfig(self._credentials, registry) or {}


def _credentials(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        # The SDK takes what is no JSON for a file without credentials.
        if not isinstance(json.loads(path.read_bytes()), dict):
            raise ValueError("no object")
        return docker.auth.load_config(config_path=str(path))
    except (*TROUBLE, KeyError, TypeError) as exc:
        problem = "cannot be read" if isinstance(exc, OSError) else "is no Docker config.json"
        # Not what the parser says: that may quote the file.
        raise ConfigError(
            f"sandbox.registry_config {path} {problem} ({type(exc).__name__})", key="sandbox.registry_config"
        ) from None
