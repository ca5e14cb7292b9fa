"""``sentinel://`` URLs: several Sentinels, one after the other, and the service whose primary is the fleet's Redis."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlsplit

__all__ = ["SCHEME", "SHAPE", "Sentinels", "parse_sentinels"]

SCHEME = "sentinel://"
SHAPE = "sentinel://:PASSWORD@HOST:26379,HOST:26379,HOST:26379/0?service=NAME"
_PORT = 26379
_OPTIONS = ("service", "sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Whom to ask where Redis is, and how to log in there.

    Attributes:
        hosts: The Sentinels, as host and port.
        service: What they call the primary that is wanted.
        username, password: Of Redis; empty: none.
        sentinel_username, sentinel_password: Of the Sentinels themselves.
    """

    hosts: tuple[tuple[str, int], ...]
    service: str
    db: int
    username: str
    password: str
    sentinel_username: str
    sentinel_password: str

    def shown(self) -> str:
        """The URL without credentials."""
        return f"{SCHEME}{','.join(_place(*host) for host in self.hosts)}/{self.db}?service={quote(self.service)}"

    def as_celery_spells_it(self) -> str:
        """One URL per Sentinel, as kombu's transport and Celery's result backend take them."""
        login = f"{quote(self.username, safe='')}:{quote(self.password, safe='')}@" if self.password else ""
        return ";".join(f"{SCHEME}{login}{_place(*host)}/{self.db}" for host in self.hosts)


def parse_sentinels(url: str) -> Sentinels:
    """What a ``sentinel://`` URL says.

    Raises:
        ValueError: What is wrong with it; nothing of its login is repeated.
    """
    parts = urlsplit(url)
    login, _, places = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    database = parts.path.strip("/") or "0"
    if not database.isdecimal() or parts.fragment:
        raise ValueError(f"the database behind the hosts must be a number: {SHAPE}")
    given = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(given)
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ValueError(f"the option {unknown[0][:40]} is not known; there are {', '.join(_OPTIONS)}")
    if not options.get("service") or len(options) != len(given):
        raise ValueError(f"the service must be named, once: {SHAPE}")
    return Sentinels(
        hosts=tuple(_host(place) for place in places.split(",")),
        service=options["service"],
        db=int(database),
        username=unquote(username),
        password=unquote(password),
        sentinel_username=options.get("sentinel_username", ""),
        sentinel_password=options.get("sentinel_password", ""),
    )


def _host(place: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or "@" in place:
        raise ValueError(f"the hosts of the Sentinels cannot be read: {SHAPE}")
    return host, port or _PORT


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
