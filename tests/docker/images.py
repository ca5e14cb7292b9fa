"""Images that tests make themselves, because no registry can be reached where they run."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from tests.services import required_services

__all__ = ["BUSYBOX", "DEBIAN", "busybox_archive", "require_image"]

#: Nothing but a static busybox: it proves that what runs there needs no more than POSIX.
BUSYBOX = "sandfleet/test-busybox:latest"
#: Debian without Python.
DEBIAN = "sandfleet/test-debian:latest"
_DEBIAN_BASE = "debian:bookworm-slim"
_WORKSPACE = "/mnt/user-data/workspace"
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nsandbox:x:10001:10001::/mnt/user-data/workspace:/bin/sh\n"
_GROUP = "root:x:0:\nsandbox:x:10001:\n"


def require_image(name: str) -> None:
    """Go on only with that image, one of ours, which is made when it is missing."""
    if _has(name):
        return
    if name == BUSYBOX:
        _docker("import", "--change", "ENV PATH=/bin", "-", BUSYBOX, given=busybox_archive())
    else:
        if not _has(_DEBIAN_BASE):
            _give_up(f"the image {_DEBIAN_BASE} is missing; .ci/run makes it")
        dockerfile = f"FROM {_DEBIAN_BASE}\nRUN ln -s {_WORKSPACE} /workspace\n"
        _docker("build", "--tag", DEBIAN, "-", given=dockerfile.encode())


def _has(name: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode == 0


def _docker(*args: str, given: bytes) -> None:
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}  # the builder that every engine has and that asks no registry
    made = subprocess.run(["docker", *args], input=given, env=environment, capture_output=True, check=False)
    assert made.returncode == 0, made.stderr.decode()


def _give_up(missing: str) -> NoReturn:
    if "docker" in required_services():
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


def busybox_archive() -> bytes:
    """That image's files as a tar archive; without a busybox the test is skipped, or fails where Docker is required."""
    with tempfile.TemporaryDirectory() as folder:
        binary = _installed() or _downloaded(Path(folder))
        if binary is None:
            _give_up("a static busybox is missing: apt-get install busybox-static")
        applets = subprocess.run([str(binary), "--list"], capture_output=True, check=True).stdout.decode().split()
        program = binary.read_bytes()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777), ("mnt", 0o755), ("proc", 0o755),
                           ("sys", 0o755), ("dev", 0o755)):  # fmt: skip
            archive.addfile(_entry(name, tarfile.DIRTYPE, mode))
        _add(archive, "bin/busybox", program, 0o755)
        for applet in applets:
            link = _entry(f"bin/{applet}", tarfile.SYMTYPE, 0o777)
            link.linkname = "busybox"
            if applet != "busybox":
                archive.addfile(link)
        workspace = _entry("workspace", tarfile.SYMTYPE, 0o777)
        workspace.linkname = _WORKSPACE
        archive.addfile(workspace)
        _add(archive, "etc/passwd", _PASSWD.encode())
        _add(archive, "etc/group", _GROUP.encode())
    return packed.getvalue()


def _installed() -> Path | None:
    """The busybox on PATH, if it needs no libraries."""
    found = shutil.which("busybox")
    if found is None:
        return None
    loader = subprocess.run([found, "cat", "/proc/self/maps"], capture_output=True, check=False).stdout
    return None if b".so" in loader else Path(found)


def _downloaded(folder: Path) -> Path | None:
    """The one of Debian's package, unpacked but not installed."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return None
    fetched = subprocess.run(
        ["apt-get", "download", "busybox-static"], cwd=folder, capture_output=True, check=False, timeout=120
    )
    packages = sorted(folder.glob("busybox-static_*.deb"))
    if fetched.returncode != 0 or not packages:
        return None
    subprocess.run(["dpkg-deb", "--extract", str(packages[0]), str(folder / "unpacked")], check=True)
    return folder / "unpacked" / "bin" / "busybox"


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    return entry


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = _entry(name, tarfile.REGTYPE, mode)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))
