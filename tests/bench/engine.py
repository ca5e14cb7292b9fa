"""What the Docker SDK takes for the same things: the yardstick of containers, and a look at the engine's containers."""

from __future__ import annotations

import contextlib
import io
import socket
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager

import docker
from docker.models.containers import Container

from sandfleet.config import Settings

__all__ = ["SdkContainer", "engine_there", "labelled", "sdk_container"]

_DIR = "/tmp"


def engine_there() -> bool:
    """Whether a Docker engine answers."""
    with contextlib.suppress(docker.errors.DockerException), contextlib.closing(docker.from_env()) as client:
        return bool(client.ping())
    return False


class SdkContainer:
    """A container that is driven by the Docker SDK alone; what comes back is checked."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._api = container.client.api

    def true(self) -> None:
        """`true` by ``docker exec``."""
        assert self._container.exec_run("true").exit_code == 0

    def cat(self, name: str, content: bytes) -> None:
        """A file, read as the output of a command."""
        assert self._container.exec_run(["cat", f"{_DIR}/{name}"]).output == content

    def get(self, name: str, content: bytes) -> None:
        """A file, read from an archive."""
        stream, _ = self._container.get_archive(f"{_DIR}/{name}")
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            found = archive.extractfile(name)
            assert found is not None
            assert found.read() == content

    def put(self, name: str, content: bytes) -> None:
        """A file, written as an archive."""
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        assert self._container.put_archive(_DIR, data.getvalue())

    def pipe(self, name: str, content: bytes) -> None:
        """A file, written by a command's stdin."""
        command = ["sh", "-c", f"head -c {len(content)} > {_DIR}/{name}"]
        exec_id = self._api.exec_create(self._container.id, command, stdin=True)["Id"]
        stream = self._api.exec_start(exec_id, socket=True)
        sock: socket.socket = getattr(stream, "_sock", stream)
        try:
            sock.sendall(content)
            while sock.recv(65536):
                pass
        finally:
            stream.close()
        assert self._api.exec_inspect(exec_id)["ExitCode"] == 0


@contextmanager
def sdk_container(settings: Settings, image: str) -> Iterator[SdkContainer]:
    """A container for the SDK, limited like a sandbox; removed at the end."""
    limits = settings.container
    with contextlib.closing(docker.from_env()) as client:
        container = client.containers.run(
            limits.image or image,
            entrypoint=["sleep", "86400"],
            detach=True,
            init=True,
            network_mode="none",
            user="10001",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            mem_limit=limits.memory_bytes,
            nano_cpus=int(limits.cpus * 1e9),
            pids_limit=limits.pids,
        )
        try:
            yield SdkContainer(container)
        finally:
            container.remove(force=True)


def labelled(settings: Settings) -> dict[str, int]:
    """The containers of a deployment, running or not: id → process 1 (0: none)."""
    data_id = (settings.data_root / "data-id").read_text().strip()
    with contextlib.closing(docker.from_env()) as client:
        found = client.api.containers(all=True, filters={"label": f"sandfleet.deployment={data_id}"})
        pids = {}
        for each in found:
            with contextlib.suppress(docker.errors.NotFound):
                pids[each["Id"]] = client.api.inspect_container(each["Id"])["State"]["Pid"]
        return pids
