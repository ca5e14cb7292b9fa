"""Which shell commands of host mode get, and which of the worker's environment. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

__all__ = ["choose_shell", "inherited_environment"]

_POSIX = ("/bin/zsh", "/usr/bin/zsh", "/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash", "/bin/sh", "/usr/bin/sh")
_WINDOWS = ("pwsh.exe", "powershell.exe", "cmd.exe")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Names that tell of a secret.
_SECRET_NAMES = (
    "*KEY*", "*SECRET*", "*TOKEN*", "*PASS*", "*CREDENTIAL*", "*DSN*", "*_AUTH", "*_PAT", "*_PWD", "*COOKIE*",
)  # fmt: skip
#: Names whose values usually hold one.
_SECRET_EXACTLY = frozenset(
    [
        "DATABASE_URL",
        "DATABASE_URI",
        "REDIS_URL",
        "MONGODB_URI",
        "MONGO_URL",
        "AMQP_URL",
        "RABBITMQ_URL",
        "POSTGRES_URL",
        "POSTGRESQL_URL",
        "MYSQL_URL",
        "CLICKHOUSE_URL",
        "CONNECTION_STRING",
        "CONN_STR",
        "GH_PAT",
        "GITHUB_PAT",
        "MYSQL_PWD",
        "REDISCLI_AUTH",
        "REDIS_AUTH",
        "PGSERVICEFILE",
        "SSH_AUTH_SOCK",
        "SSH_AGENT_PID",
        "GPG_AGENT_INFO",
        "KUBECONFIG",
        "DOCKER_CONFIG",
        "CELERY_BROKER_URL",
        "CELERY_RESULT_BACKEND",
    ]
)
#: The worker's own settings, its Redis among them; and what belongs to the worker's home and place.
_OWN = ("SANDFLEET_*", "PWD", "OLDPWD", "SHLVL", "_", "HOME", "TMPDIR", "BASH_ENV", "ENV", "ZDOTDIR")
#: A URL with a password, or with a token in place of the user, whatever the variable is called.
_URL_WITH_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s@]*(?::[^/\s@]+|[^/\s@:]{16})@")


def choose_shell(exists: Callable[[str], bool], platform: str) -> str | None:
    """The shell of a host: zsh before bash before sh, on Windows PowerShell before cmd; None without any.

    Args:
        exists: Whether a program is there: an absolute path on POSIX systems, a name to be looked up on Windows.
        platform: As `sys.platform` says it.
    """
    candidates = _WINDOWS if platform.startswith("win") else (*_POSIX, "sh")
    return next((shell for shell in candidates if exists(shell)), None)


def inherited_environment(environ: Mapping[str, str], injected: Mapping[str, str]) -> dict[str, str]:
    """What commands see of the worker's environment, with ``injected`` on top.

    Left out is what is called like a secret, what is known to hold one, a URL with a password under any name, the
    worker's own settings and agents. Names a shell cannot hold are left out too.
    """
    kept = {name: value for name, value in environ.items() if _NAME.fullmatch(name) and not _is_secret(name, value)}
    return {**kept, **injected}


def _is_secret(name: str, value: str) -> bool:
    upper = name.upper()
    return (
        upper in _SECRET_EXACTLY
        or any(fnmatchcase(upper, pattern) for pattern in (*_SECRET_NAMES, *_OWN))
        or _URL_WITH_PASSWORD.search(value) is not None
    )
