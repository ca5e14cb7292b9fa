"""Mounts: what may stand where, and a directory that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandfleet.cli import main
from sandfleet.config import Mount, Settings, check_mounts, check_mounts_exist
from sandfleet.config.mounts import mount_conflict
from sandfleet.errors import ConfigError


def mount(container_path: str, host_path: str = "/srv/data") -> dict[str, str]:
    return {"host_path": host_path, "container_path": container_path}


@pytest.mark.parametrize(
    ("path", "reserved"),
    [
        ("/mnt/user-data", "/mnt/user-data"),
        ("/mnt/user-data/workspace/x", "/mnt/user-data"),
        ("/mnt/skills/custom", "/mnt/skills"),
        ("/mnt/acp-workspace", "/mnt/acp-workspace"),
        ("/mnt", "/mnt/user-data"),
        ("/", "/mnt/user-data"),
        ("/proc/sys", "/proc"),
        ("/sys", "/sys"),
        ("/dev/shm", "/dev"),
        ("/.sandfleet/x", "/.sandfleet"),
        ("/workspace", "/workspace"),
    ],
)
def test_a_mount_may_not_be_lie_in_or_hide_a_reserved_path(path: str, reserved: str) -> None:
    assert mount_conflict(path) == reserved
    with pytest.raises(ConfigError, match=rf"mounts\[0\].*{path}.*{reserved} is reserved"):
        Settings.load({}, mounts=[mount(path)])


@pytest.mark.parametrize(
    "path",
    ["/mnt/user-database", "/mnt/skills2", "/process", "/home/user/shared", "/workspace/data", "/data", "/mnt/a b"],
)
def test_a_neighbour_of_a_reserved_path_is_fine(path: str) -> None:
    assert mount_conflict(path) is None
    assert Settings.load({}, mounts=[mount(path)]).mounts[0].container_path == path


def test_the_skills_are_reserved_where_they_are_and_nowhere_else() -> None:
    moved = Settings.load({}, skills_container_path="/opt/skills", mounts=[mount("/mnt/skills")])
    assert moved.mounts[0].container_path == "/mnt/skills"
    with pytest.raises(ConfigError, match="/opt/skills is reserved"):
        Settings.load({}, skills_container_path="/opt/skills", mounts=[mount("/opt/skills/x")])


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (mount("relative"), r"mounts\[0\]\.container_path: must be an absolute path"),
        (mount("/a/../mnt/user-data"), "without `.`, `..`"),
        (mount("/a/./b"), "without `.`, `..`"),
        (mount("//a"), "without `.`, `..`"),
        (mount("/a\\b"), "NUL or a backslash"),
        (mount("/a\0"), "NUL or a backslash"),
        (mount("/a\nb"), "line breaks"),
        (mount("/a", "srv"), r"mounts\[0\]\.host_path: must be an absolute path"),
        (mount("/a", "/srv\0"), "NUL"),
        ({"container_path": "/a"}, "host_path: Field required"),
        ({**mount("/a"), "mode": "ro"}, r"mounts\[0\]\.mode: Extra inputs"),
    ],
)
def test_a_mount_that_is_none_is_named(one: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings.load({}, mounts=[one])


def test_a_slash_at_the_end_is_no_difference() -> None:
    assert Settings.load({}, mounts=[mount("/data/")]).mounts[0].container_path == "/data"
    with pytest.raises(ConfigError, match="is reserved"):
        Settings.load({}, mounts=[mount("/mnt/user-data/")])


def test_no_path_is_given_twice() -> None:
    with pytest.raises(ConfigError, match=r"mounts\[1\]: /data is taken by mounts\[0\] already"):
        Settings.load({}, mounts=[mount("/data"), mount("/data/", "/srv/other")])


def test_a_conflict_in_the_file_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "sandfleet.yaml"
    file.write_text("sandbox:\n  mounts:\n    - {host_path: /a, container_path: /proc}\n")
    with pytest.raises(ConfigError, match=r"sandfleet\.yaml:2: sandbox\.mounts\[0\]: /proc cannot be used"):
        Settings.load({}, config=file)


@pytest.mark.parametrize("path", ["/workspace/data", "/usr/x", "/etc", "/tmp", "/var/run/x"])
def test_config_check_tells_what_a_node_with_local_sandboxes_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    file = tmp_path / "c.yaml"
    for backend, code in (("local", 2), ("host", 2), ("mock", 0)):
        one = f"{{host_path: {tmp_path}, container_path: {path}}}"
        file.write_text(f"sandbox:\n  backend: {backend}\n  mounts: [{one}]\n")
        assert main(["config", "check", str(file)]) == code
        assert (f"mounts[0]: {path} cannot be used" in capsys.readouterr().err) is (code == 2)


def test_mounts_may_come_as_json_from_the_environment() -> None:
    text = '[{"host_path": "/srv", "container_path": "/data", "read_only": true}]'
    [found] = Settings.load({"SANDFLEET_MOUNTS": text}).mounts
    assert (found.host_path, found.container_path, found.read_only) == (Path("/srv"), "/data", True)
    with pytest.raises(ConfigError, match="SANDFLEET_MOUNTS"):
        Settings.load({"SANDFLEET_MOUNTS": "/srv:/data"})


def test_a_directory_that_is_not_there_is_told_with_its_mount(tmp_path: Path) -> None:
    there = Mount(host_path=tmp_path, container_path="/there")
    check_mounts_exist([there], tmp_path)
    (tmp_path / "file").write_text("")
    for name, words in (("missing", "does not exist"), ("file", "is no directory")):
        absent = Mount(host_path=tmp_path / name, container_path="/absent")
        with pytest.raises(ConfigError, match=rf"mounts\[1\] \(/absent\): host_path .*{name} {words}") as refused:
            check_mounts_exist([there, absent])
        assert refused.value.facts["host_path"] == str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"skills\.path"):
        check_mounts_exist([], tmp_path / "missing")


def test_the_pure_check_looks_at_no_disk() -> None:
    check_mounts([Mount(host_path=Path("/surely/not/there"), container_path="/data")])
