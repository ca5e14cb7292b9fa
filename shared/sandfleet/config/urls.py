"""URLs with passwords: what is wrong with one, and how it may be shown. Neither repeats a secret."""

from __future__ import annotations

from urllib.parse import urlsplit

from sandfleet.config.sentinel import SCHEME, parse_sentinels

__all__ = ["HIDDEN", "redis_url_problem", "scrubbed"]

HIDDEN = "(hidden)"
_SCHEMES = ("redis", "rediss", "unix", "sentinel")
_ENCODE = "write / as %2F, # as %23, ? as %3F and @ as %40 in a password"


def redis_url_problem(url: str) -> str | None:
    """What is wrong with a Redis URL; None when it can be used.

    A password with a slash in it makes everything before the slash look like host and port, so what stands there is
    not repeated, nor is what the parser says of it.
    """
    if not url.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES)):
        return "must start with redis://, rediss://, unix:// or sentinel://"
    if url.startswith(SCHEME):
        return _sentinel_problem(url)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return f"host and port cannot be read: redis://:PASSWORD@HOST:6379/0; {_ENCODE}"
    if parts.scheme == "unix":
        return None
    if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        return f"the database behind host and port must be a number: redis://:PASSWORD@HOST:6379/0; {_ENCODE}"
    if parts.fragment or (parts.query and "=" not in parts.query):
        return f"something stands behind the database that is no option; {_ENCODE}"
    return None


def _sentinel_problem(url: str) -> str | None:
    try:
        parse_sentinels(url)
    except ValueError as exc:
        return f"{exc}; {_ENCODE}"
    return None


def scrubbed(url: str) -> str:
    """The URL without credentials and without the values behind its question mark."""
    if url.startswith(SCHEME):
        return _sentinels_scrubbed(url)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return HIDDEN
    if "@" in url and "@" not in parts.netloc:
        return HIDDEN  # a password that was not encoded: it is anywhere
    if "@" not in parts.netloc and not parts.query and not parts.fragment:
        return url
    place = parts.netloc.rpartition("@")[2]
    if "@" in parts.netloc:
        place = f"***@{place}"
    return parts._replace(netloc=place, query="***" if parts.query else "", fragment="").geturl()


def _sentinels_scrubbed(url: str) -> str:
    try:
        found = parse_sentinels(url)
    except ValueError:
        return HIDDEN
    return found.shown().replace(SCHEME, f"{SCHEME}***@") if found.password or found.sentinel_password else url
