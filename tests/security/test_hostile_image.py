"""An image whose interpreter is the enemy's (catalogue E8): the node looks for a Python in an image and has it compile
sandboxd, and what it finds there gets no more power than the agent, and no word of what it says does any harm."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandfleet.errors import StartFailed
from sandfleet_workers.backends.docker import program
from sandfleet_workers.backends.docker.backend import DockerBackend
from tests.security.boxes import Boxes, opened
from tests.services import SANDBOX_IMAGE, require

pytestmark = [pytest.mark.docker, pytest.mark.slow]

CANARY = "canary-2d8a40"
TAG = f"sandfleet/test-trojan-{os.getpid()}"
#: Called thrice: to be tried, to compile, and as process 1.
TROJAN = r"""#!/bin/bash
run=/.sandfleet/run
[ -e $run/python ] || exit 0
case "$MODE" in
links) rm -f $run/code $run/python; ln -s "$SECRET" $run/code; ln -s "$SECRET" $run/python ;;
fifos) rm -f $run/code $run/python; mkfifo $run/code $run/python ;;
huge) truncate -s 1T $run/code $run/python ;;
words) printf "/bin/sh\n-c evil" > $run/python; echo code ;;
path) printf "/../../bin/sh" > $run/python; echo code ;;
rubbish) head -c 5000 /dev/urandom ;;
hang) exec sleep 1000 ;;
report)
    grep -E "^(Uid|Gid|Groups|CapEff|CapBnd|NoNewPrivs|Seccomp):" /proc/self/status
    for file in /x /etc/x /.sandfleet/sandboxd.py /.sandfleet/x /mnt/x /proc/sys/kernel/core_pattern; do
        (echo >> $file) 2> /dev/null && echo "wrote $file"
    done
    ls /var/run/docker.sock "$SECRET" 2> /dev/null
    tail -n +3 /proc/net/dev | cut -d: -f1
    mount -t tmpfs none /mnt 2> /dev/null && echo mounted ;;
esac
exit 0
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("image")
    (made / "secret").write_text(CANARY)
    return made


@pytest.fixture(scope="module")
def image(root: Path) -> Iterator[Callable[[str], str]]:
    """Makes the trojan's image for a mode; they are gone afterwards."""
    require("docker")
    context = root / "context"
    context.mkdir()
    (context / "python3").write_text(TROJAN)
    (context / "python3").chmod(0o755)
    made: list[str] = []

    def make(mode: str) -> str:
        lines = [f"FROM {SANDBOX_IMAGE}", "USER root", f"ENV MODE={mode} SECRET={root / 'secret'}",
                 "COPY python3 /usr/bin/python3", "COPY python3 /usr/local/bin/python3"]  # fmt: skip
        (context / "Dockerfile").write_text("\n".join(lines) + "\n")
        name = f"{TAG}:{mode}"
        done = subprocess.run(
            ["docker", "build", "--quiet", "--tag", name, str(context)],
            env={**os.environ, "DOCKER_BUILDKIT": "0"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made.append(name)
        return name

    yield make
    subprocess.run(["docker", "rmi", "--force", *made], capture_output=True, check=True)


def probed(boxes: Boxes) -> list[dict[str, Any]]:
    """The descriptions of the containers in which images are looked at, from now on."""
    backend = boxes.backend
    assert isinstance(backend, DockerBackend)
    starter, seen = backend._starter, list[dict[str, Any]]()
    probe = starter.probe

    def keep(name: str, body: Any, timeout_s: float) -> int | None:
        seen.append(dict(body))
        return probe(name, body, timeout_s)

    starter.probe = keep  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("mode", ["links", "fifos", "huge", "words", "path", "rubbish", "hang"])
def test_E8_what_a_trojan_interpreter_leaves_is_taken_for_nothing_else(
    root: Path, tmp_path: Path, image: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(program, "_PROBE_S", 3.0)
    with opened("docker", tmp_path, container={"image": image(mode)}) as boxes:
        with pytest.raises(StartFailed) as failed:
            boxes.made("victim")
        assert failed.value.facts["reason"] in ("image_unusable", "sandboxd_failed", "unreachable", "exited"), failed
        assert CANARY not in json.dumps(failed.value.to_wire())
        assert boxes.backend.running() == []
        assert boxes.backend.leftovers() == {}
        # Nothing of the host was copied to where sandboxes can read it, and nothing was changed there.
        kept = [path for path in (tmp_path / "nodes").rglob("*") if path.is_file()]
        assert all(CANARY.encode() not in path.read_bytes() for path in kept)
        assert all(path.stat().st_size < program._CODE_BYTES for path in kept)
        assert list((tmp_path / "run").iterdir()) == []
    assert (root / "secret").read_text() == CANARY


def test_E8_a_trojan_interpreter_has_no_more_power_than_the_agent(
    root: Path, tmp_path: Path, image: Callable[[str], str]
) -> None:
    with opened("docker", tmp_path, container={"image": image("report"), "network_mode": "full"}) as boxes:
        seen = probed(boxes)
        with pytest.raises(StartFailed):
            boxes.made("victim")
        (report,) = [path.read_text() for path in (tmp_path / "nodes").rglob("*.pyc")]
    told = dict(line.split(":\t") for line in report.splitlines() if ":\t" in line)
    assert told["Uid"].split()[0] == "10001"
    assert (told["CapEff"], told["CapBnd"]) == ("0" * 16, "0" * 16)
    assert (told["NoNewPrivs"], told["Seccomp"]) == ("1", "2")
    rest = [line.strip() for line in report.splitlines() if ":\t" not in line]
    assert rest == ["lo"], "it wrote nowhere, mounted nothing and saw no network"
    (body,) = seen
    strict = json.loads((Path(__file__).parents[1] / "golden" / "docker" / "strict.json").read_text())
    for name, value in strict["HostConfig"].items():
        if name != "Mounts":
            assert body["HostConfig"][name] == value, name
    mounts = {mount["Target"]: mount["ReadOnly"] for mount in body["HostConfig"]["Mounts"]}
    assert mounts == {"/.sandfleet/run": False, "/.sandfleet/sandboxd.py": True}, "and nothing of any thread"
    assert not os.path.lexists("/x")
