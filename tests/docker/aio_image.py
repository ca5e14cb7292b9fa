"""A small AIO-compatible image: sandboxd, which speaks the same API, at port 8080 of the sandbox image."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from sandfleet_workers import sandboxd
from sandfleet_workers.backends.aio import AioBackend
from sandfleet_workers.backends.docker.policy import DEFAULT_IMAGE
from tests.docker.sandboxes import docker_settings

__all__ = ["TokenBackend", "aio_backend", "aio_image"]

TOKEN = "the-token-in-the-image"
_DOCKERFILE = f"""
FROM {DEFAULT_IMAGE}
USER 0:0
COPY sandboxd.py config.json /opt/
ENTRYPOINT ["python3", "-I", "-S", "-B", "/opt/sandboxd.py", "--tcp", "0.0.0.0:8080", "--config", "/opt/config.json"]
"""


class TokenBackend(AioBackend):
    """For the image below, whose server insists on a token."""

    token: ClassVar[str | None] = TOKEN


@contextmanager
def aio_image() -> Iterator[str]:
    """The image's name; removed at the end, and so are its layers."""
    name = f"sandfleet/test-aio:{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "Dockerfile": _DOCKERFILE.encode(),
            "sandboxd.py": sandboxd.PATH.read_bytes(),
            "config.json": json.dumps({"key": "00" * 16, "token": TOKEN}).encode() + b"\n",
        }
        for file, content in files.items():
            (Path(folder) / file).write_bytes(content)
        _docker("build", "--quiet", "--tag", name, folder)
    try:
        yield name
    finally:
        _docker("rmi", "--force", name)


def _docker(*arguments: str) -> None:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def aio_backend(root: Path, on_death: Callable[[str, str], None], image: str, **given: str) -> TokenBackend:
    """A backend whose sandboxes are made of that image."""
    return TokenBackend(docker_settings(root, container={"image": image, **given}), on_death)
