"""The directories of a node that its sandboxes see: checked and resolved once, when the node starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sandfleet.config import Mount, Settings
from sandfleet.errors import ConfigError, StartFailed
from sandfleet_workers.backends.mounts import acp_directory, node_mounts


def settings(**given: Any) -> Settings:
    return Settings.load({}, **given)


def test_without_settings_there_are_no_mounts() -> None:
    assert node_mounts(settings()) == ()


def test_mounts_and_skills_are_resolved_and_inner_ones_come_last(tmp_path: Path) -> None:
    for name in ("real", "skills", "inner"):
        (tmp_path / name).mkdir()
    (tmp_path / "real/inner").mkdir()
    (tmp_path / "link").symlink_to("real")
    planned = node_mounts(
        settings(
            mounts=(
                Mount(host_path=tmp_path / "inner", container_path="/mnt/data/inner", read_only=True),
                Mount(host_path=tmp_path / "skills" / ".." / "link", container_path="/mnt/data"),
            ),
            skills_path=tmp_path / "skills",
            skills_container_path="/mnt/k",
        )
    )
    assert planned == (
        (tmp_path / "skills", "/mnt/k", True),
        (tmp_path / "real", "/mnt/data", False),
        (tmp_path / "inner", "/mnt/data/inner", True),
    )


@pytest.mark.parametrize(
    "target", ["/usr/share/x", "/etc", "/bin/x", "/lib64", "/tmp", "/var", "/run", "/var/tmp/x", "/var/run/x",
               "/workspace/x", "/mnt/skills/x",
               "/mnt/user-data/x", "/mnt/acp-workspace", "/proc/x", "/dev", "/"]
)  # fmt: skip
def test_what_a_sandbox_needs_itself_is_not_covered_by_a_mount(tmp_path: Path, target: str) -> None:
    with pytest.raises(ConfigError, match=r"(?i)mounts") as refused:
        node_mounts(settings(mounts=(Mount(host_path=tmp_path, container_path=target),)))
    assert target.rstrip("/") in str(refused.value)


def test_below_the_directories_of_temporary_files_a_mount_is_fine(tmp_path: Path) -> None:
    mount = Mount(host_path=tmp_path, container_path="/tmp/data")
    assert node_mounts(settings(mounts=(mount,))) == ((tmp_path, "/tmp/data", False),)


def test_a_missing_host_path_is_told_with_its_mount(tmp_path: Path) -> None:
    mount = Mount(host_path=tmp_path / "none", container_path="/mnt/data")
    with pytest.raises(ConfigError, match=r"mounts\[0\] \(/mnt/data\).*none.*does not exist"):
        node_mounts(settings(mounts=(mount,)))
    with pytest.raises(ConfigError, match="skills"):
        node_mounts(settings(skills_path=tmp_path / "none"))


@pytest.mark.parametrize("there", ["none", "file", "link"])
def test_a_mount_in_another_one_needs_a_directory_there(tmp_path: Path, there: str) -> None:
    (tmp_path / "outer/deep").mkdir(parents=True)
    (tmp_path / "inner").mkdir()
    (tmp_path / "outer/deep/file").write_text("")
    (tmp_path / "outer/deep/link").symlink_to(tmp_path / "inner")
    mounts = (
        Mount(host_path=tmp_path / "inner", container_path=f"/mnt/data/deep/{there}"),
        Mount(host_path=tmp_path / "outer", container_path="/mnt/data", read_only=True),
    )
    with pytest.raises(ConfigError, match=rf"mounts\[0\] \(/mnt/data/deep/{there}\): .* make {tmp_path}/outer/deep/"):
        node_mounts(settings(mounts=mounts))


def test_the_skills_lie_where_nothing_else_does(tmp_path: Path) -> None:
    for target in ("/mnt/user-data/skills", "/mnt", "/proc/x", "/workspace"):
        with pytest.raises(ConfigError, match=rf"skills.container_path: {target} cannot be used"):
            settings(skills_container_path=target)
    with pytest.raises(ConfigError, match=r"skills.container_path: /usr/skills cannot be used"):
        node_mounts(settings(skills_path=tmp_path, skills_container_path="/usr/skills"))


def test_a_node_without_local_sandboxes_has_no_use_for_their_paths(tmp_path: Path) -> None:
    mount = Mount(host_path=tmp_path, container_path="/workspace/data")
    assert node_mounts(settings(mounts=(mount,), backend="mock")) == ((tmp_path, "/workspace/data", False),)
    with pytest.raises(ConfigError, match="/workspace"):
        node_mounts(settings(mounts=(mount,), backend="mock", backends=("mock", "host")))


@pytest.mark.parametrize("target", ["/", "file", "none"])
def test_something_planted_in_place_of_the_acp_workspace_is_not_followed(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "acp-workspace").symlink_to(target)
    with pytest.raises(StartFailed, match="ACP workspace"):
        acp_directory(tmp_path / "user-data")
    assert not (tmp_path / "none").exists()


def test_the_acp_workspace_lies_beside_the_threads_data(tmp_path: Path) -> None:
    assert acp_directory(tmp_path / "user-data") == tmp_path / "acp-workspace"
    assert acp_directory(tmp_path / "user-data").is_dir()
