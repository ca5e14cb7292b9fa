"""What an engine tells of itself, judged: recorded answers, no engine."""

from __future__ import annotations

from typing import Any

import pytest

from sandfleet.backends import Finding
from sandfleet_workers.backends.docker.engine_findings import judged

VERSION: dict[str, Any] = {
    "Version": "29.5.1",
    "ApiVersion": "1.52",
    "Components": [
        {"Name": "Engine", "Version": "29.5.1", "Details": {"GitCommit": "abc1234"}},
        {"Name": "containerd", "Version": "v2.3.2", "Details": {"GitCommit": "0123456789abcdef"}},
        {"Name": "runc", "Version": "1.4.3", "Details": {"GitCommit": "v1.4.3-0-g0123456"}},
        {"Name": "docker-init", "Version": "0.19.0", "Details": {}},
    ],
}
INFO: dict[str, Any] = {
    "OSType": "linux",
    "Driver": "overlay2",
    "CgroupVersion": "2",
    "MemoryLimit": True,
    "SwapLimit": True,
    "PidsLimit": True,
    "CpuCfsQuota": True,
    "DefaultRuntime": "runc",
    "Runtimes": {"runc": {"path": "runc"}, "runsc": {"path": "/usr/bin/runsc"}, "io.containerd.runc.v2": {}},
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=builtin", "name=cgroupns"],
}


def look(*, runtime: str = "", version: dict[str, Any] | None = None, **info: Any) -> dict[str, Finding]:
    return {found.name: found for found in judged(version or VERSION, {**INFO, **info}, runtime=runtime)}


def test_an_engine_that_has_everything_is_ok_throughout() -> None:
    found = look()
    assert {name: finding.status for name, finding in found.items()} == dict.fromkeys(
        ["docker engine", "docker version", "docker containerd", "docker runc", "docker runtime",
         "docker confinement", "docker cgroup"], "ok",
    )  # fmt: skip
    assert found["docker engine"].found == "29.5.1 (API 1.52), overlay2, root's"
    assert "runsc" in found["docker runtime"].found
    assert "io.containerd" not in found["docker runtime"].found


def test_a_configured_runtime_that_is_absent_fails_and_nothing_takes_its_place() -> None:
    assert look(runtime="runsc")["docker runtime"].status == "ok"
    absent = look(runtime="kata")["docker runtime"]
    assert (absent.status, absent.ready) == ("fail", False)
    assert "kata" in absent.advice


@pytest.mark.parametrize("options", [[], ["name=apparmor"], ["name=seccomp,profile=unconfined"]])
def test_an_engine_without_seccomp_fails(options: list[str]) -> None:
    assert look(SecurityOptions=options)["docker confinement"].status == "fail"


def test_an_engine_that_does_not_say_what_confines_is_not_accused() -> None:
    assert "docker confinement" not in look(SecurityOptions=None)


@pytest.mark.parametrize(
    ("key", "what"), [("MemoryLimit", "memory"), ("PidsLimit", "processes"), ("CpuCfsQuota", "CPU")]
)
def test_a_limit_that_would_not_hold_fails_and_is_named(key: str, what: str) -> None:
    found = look(**{key: False})["docker cgroup"]
    assert found.status == "fail"
    assert f"no limit of {what}:" in found.advice


def test_old_cgroups_and_missing_swap_limits_warn() -> None:
    assert look(CgroupVersion="1")["docker cgroup"].status == "warn"
    assert "swapaccount" in look(SwapLimit=False)["docker cgroup"].advice


def test_rootless_and_remapped_engines_are_shown_as_such() -> None:
    assert "rootless" in look(SecurityOptions=["name=seccomp,profile=default", "name=rootless"])["docker engine"].found
    assert "users remapped" in look(SecurityOptions=["name=seccomp", "name=userns"])["docker engine"].found


def test_windows_containers_and_copying_storage_are_told() -> None:
    assert not look(OSType="windows")["docker engine"].ready
    assert look(Driver="vfs")["docker engine"].status == "warn"


def test_holes_of_the_parts_are_found_by_their_version() -> None:
    parts = [{"Name": "runc", "Version": "1.1.11", "Details": {"GitCommit": "v1.1.11-0-g4bccb38"}}]
    assert look(version={**VERSION, "Components": parts})["docker runc"].status == "fail"
    debian = [{"Name": "runc", "Version": "1.1.5+ds1", "Details": {"GitCommit": "1.1.5+ds1-1+deb12u1"}}]
    assert look(version={**VERSION, "Components": debian})["docker runc"].status == "warn"


def test_an_engine_that_tells_little_is_judged_by_what_it_tells() -> None:
    found = judged({"Version": "4.3.1"}, {}, runtime="")
    assert [finding.name for finding in found] == ["docker engine", "docker runtime", "docker cgroup"]
