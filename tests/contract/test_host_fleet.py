"""Host mode through a real fleet: settings, mounts, refusal, and how people are told that nothing is isolated."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandfleet import SandboxProvider
from sandfleet.backends import shown_backend
from sandfleet.cli import main
from sandfleet.config import Mount
from sandfleet.errors import HostBashDisabled, PermissionDenied, ReadOnly, Unavailable
from sandfleet.stack import Stack
from tests.services import require

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mounted directories, where every user can walk to."""
    path = Path(tempfile.mkdtemp(prefix="sf-shared-", dir="/var/tmp"))
    for name in ("skills/public", "data"):
        (path / name).mkdir(parents=True)
    path.chmod(0o755)
    (path / "data").chmod(0o777)
    (path / "skills/public/SKILL.md").write_text("how to\n")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module", params=["host", "local"])
def stack(request: pytest.FixtureRequest, shared: Path) -> Iterator[Stack]:
    require("redis")
    if request.param == "local":
        require("bwrap")
    with Stack(
        nodes=1,
        backend=request.param,
        lease_s=3.0,
        allow_host_bash=True,
        skills_path=shared / "skills",
        mounts=(Mount(host_path=shared / "skills" / ".." / "data", container_path="/mnt/data"),),
    ) as made:
        yield made


def test_skills_mounts_and_the_acp_workspace_are_seen_the_same_in_both_modes(stack: Stack, shared: Path) -> None:
    with SandboxProvider(stack.settings) as provider:
        sandbox = provider.get(provider.acquire("t1"))
        assert sandbox is not None
        (stack.settings.data_root / "threads/t1/acp-workspace/plan").write_text("of the other agent")
        assert sandbox.read_file("/mnt/skills/public/SKILL.md") == "how to\n"
        assert sandbox.read_file("/mnt/acp-workspace/plan") == "of the other agent"
        sandbox.write_file("/mnt/data/f", stack.settings.backend)
        assert (shared / "data/f").read_text() == stack.settings.backend
        assert sandbox.run("cat /mnt/skills/public/SKILL.md /mnt/acp-workspace/plan /mnt/data/f; pwd").stdout == (
            f"how to\nof the other agent{stack.settings.backend}/mnt/user-data/workspace\n"
        )
        for path in ("/mnt/skills/public/SKILL.md", "/mnt/skills/new", "/mnt/acp-workspace/plan"):
            with pytest.raises(ReadOnly) as refused:
                sandbox.write_file(path, "x")
            assert refused.value.errno == 30
        if stack.settings.backend == "host":
            with pytest.raises(PermissionDenied, match="Use paths under /mnt/acp-workspace, /mnt/data, /mnt/skills"):
                sandbox.run("cat /etc/passwd")


def test_people_are_told_that_host_mode_does_not_isolate(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    with SandboxProvider(stack.settings) as provider:
        provider.acquire("t2")
        name = stack.settings.backend
        for command in ("ls", "nodes"):
            assert main(["--redis-url", stack.settings.redis_url, command]) == 0
            shown = capsys.readouterr().out
            assert shown_backend(name) in shown
            assert ("not isolated" in shown) is (name == "host"), command
        assert main(["--redis-url", stack.settings.redis_url, "ls", "--json"]) == 0
        assert f'"{name}"' in json.dumps(json.loads(capsys.readouterr().out))


def test_a_node_that_does_not_allow_it_refuses_commands_and_serves_files() -> None:
    require("redis")
    with Stack(nodes=1, backend="host", lease_s=3.0) as stack, SandboxProvider(stack.settings) as provider:
        sandbox = provider.get(provider.acquire("t1"))
        assert sandbox is not None
        sandbox.write_file("f", "x")
        assert sandbox.read_file("/mnt/user-data/workspace/f") == "x"
        for refused in (lambda: sandbox.run("touch g"), lambda: sandbox.run("touch g", session="s")):
            with pytest.raises(HostBashDisabled, match="allow_host_bash"):
                refused()
        assert [info.name for info in sandbox.list_files("/mnt/user-data/workspace")] == ["f"]


def test_a_node_with_a_missing_mount_does_not_start_and_names_it(tmp_path: Path) -> None:
    require("redis")
    mount = Mount(host_path=tmp_path / "none", container_path="/mnt/data")
    with (
        pytest.raises(Unavailable, match=r"mounts\[0\] \(/mnt/data\): host_path .*none does not exist"),
        Stack(nodes=1, backend="mock", mounts=(mount,)),
    ):
        pass
