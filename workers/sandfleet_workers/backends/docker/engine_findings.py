"""What an engine tells of itself (``/version``, ``/info``), judged for `sandfleet doctor`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandfleet.backends import Finding
from sandfleet.known_bad import version_finding

__all__ = ["judged"]

Told = Mapping[str, Any]

#: Names that engines give their parts -> names of the file of known holes.
_COMPONENTS = {"Engine": "moby", "containerd": "containerd", "runc": "runc"}
_LIMITS = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "CPU"}


def judged(version: Told, info: Told, *, runtime: str) -> list[Finding]:
    """The engine's findings.

    Args:
        version: The answer of ``/version``.
        info: The answer of ``/info``.
        runtime: The runtime that is configured; empty is the engine's default.
    """
    found = [_engine(version, info), *_versions(version), _runtime(info, runtime), _confinement(info), _cgroup(info)]
    return [finding for finding in found if finding is not None]


def _options(info: Told) -> dict[str, str]:
    """``SecurityOptions`` as name -> the rest: ``name=seccomp,profile=default``."""
    pairs = [str(option).partition(",") for option in info.get("SecurityOptions") or ()]
    return {name.removeprefix("name="): rest for name, _, rest in pairs}


def _engine(version: Told, info: Told) -> Finding:
    options = _options(info)
    whose = "rootless" if "rootless" in options else "root's"
    users = ", users remapped" if "userns" in options else ""
    driver = str(info.get("Driver") or "unknown storage")
    what = f"{version.get('Version', '?')} (API {version.get('ApiVersion', '?')}), {driver}, {whose}{users}"
    if str(info.get("OSType") or "linux") != "linux":
        return Finding(
            "docker engine", "fail", what, "sandboxes are Linux containers: use an engine that runs those", ready=False
        )
    if driver == "vfs":
        advice = "the storage driver vfs copies the whole image for each sandbox: use overlay2"
        return Finding("docker engine", "warn", what, advice)
    return Finding("docker engine", "ok", what)


def _versions(version: Told) -> list[Finding]:
    found = []
    for part in version.get("Components") or ():
        component = _COMPONENTS.get(str(part.get("Name")))
        if component is not None:
            build = str((part.get("Details") or {}).get("GitCommit") or "")
            label = f"docker {'version' if component == 'moby' else component}"
            found.append(version_finding(component, str(part.get("Version") or ""), build=build, label=label))
    return found


def _runtime(info: Told, runtime: str) -> Finding:
    known = sorted(name for name in info.get("Runtimes") or () if not name.startswith("io.containerd."))
    default = str(info.get("DefaultRuntime") or "the engine's default")
    if not runtime:
        others = ", ".join(name for name in known if name != default)
        return Finding("docker runtime", "ok", f"{default}, by default" + (f"; there are {others}" if others else ""))
    if runtime in known:
        return Finding("docker runtime", "ok", f"{runtime}, as configured")
    advice = (
        f"install {runtime} and name it under `runtimes` in the engine's daemon.json, or change `sandbox.runtime`; "
        "nothing else is used in its place"
    )
    return Finding(
        "docker runtime", "fail", f"no {runtime}; there are {', '.join(known) or 'none'}", advice, ready=False
    )


def _confinement(info: Told) -> Finding | None:
    """Seccomp holds what capabilities do not; an engine that does not say what it has (Podman) is left alone."""
    if info.get("SecurityOptions") is None:
        return None
    options = _options(info)
    shown = ", ".join(name for name in ("seccomp", "apparmor", "selinux", "userns", "rootless") if name in options)
    profile = options.get("seccomp")
    if profile is None or "unconfined" in profile:
        advice = "sandboxes rely on the default seccomp profile: enable it in the kernel and the engine's daemon.json"
        return Finding("docker confinement", "fail", f"no seccomp; {shown or 'nothing else'}", advice)
    return Finding("docker confinement", "ok", shown)


def _cgroup(info: Told) -> Finding:
    number = str(info.get("CgroupVersion") or "1")
    missing = [what for key, what in _LIMITS.items() if info.get(key) is False]
    found = f"v{number}, limits of {', '.join(what for what in _LIMITS.values() if what not in missing) or 'nothing'}"
    if missing:
        advice = (
            f"sandboxes would have no limit of {', '.join(missing)}: enable those cgroup controllers; of a rootless "
            "engine, delegate them to its user (systemd: Delegate=cpu cpuset io memory pids)"
        )
        return Finding("docker cgroup", "fail", found, advice)
    if info.get("SwapLimit") is False:
        return Finding("docker cgroup", "warn", f"{found}, not of swap", "boot with swapaccount=1, or without swap")
    if number == "1":
        advice = "boot with systemd.unified_cgroup_hierarchy=1: newer runtimes give v1 up, and only v2 hides the host's"
        return Finding("docker cgroup", "warn", found, advice)
    return Finding("docker cgroup", "ok", found)
