"""Prometheus' ``/metrics`` of a process of ours: where it listens, and the little server.

Needs the extra ``metrics`` (prometheus-client). What is measured lies with the roles: `sandfleet_workers.metrics` and
`sandfleet_scheduler.metrics`. Labels come from closed sets (kinds, outcomes, states, node ids), never from callers.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from sandfleet.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["SECONDS", "MetricsServer", "Tally", "new_registry", "nth_address", "parse_address"]

log = logging.getLogger("sandfleet.metrics")

#: Bounds of every histogram of seconds: from a mock operation to a long command.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

_LOOPBACK = "127.0.0.1"
_SLOWEST_CLIENT_S = 10.0
_KEY = "metrics_address"


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of ``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` or ``PORT``; without a host it is loopback. Pure.

    Raises:
        ConfigError: It is none of these, or the port is above 65535.
    """
    found = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]*)):)?(\d{1,5})", text.strip())
    if found is None or int(found[3]) > 65535:
        raise ConfigError(
            f"metrics_address {text!r} is not HOST:PORT, such as 127.0.0.1:9464; port 0 takes a free one", key=_KEY
        )
    return found[1] or found[2] or _LOOPBACK, int(found[3])


def nth_address(text: str, n: int) -> str:
    """The address of the n-th process on one machine: the port counts up, unless it is 0 (any free one). Pure.

    Raises:
        ConfigError: As `parse_address`.
    """
    if not text:
        return text
    host, port = parse_address(text)
    return f"[{host}]:{port + n if port else 0}" if ":" in host else f"{host}:{port + n if port else 0}"


def new_registry() -> CollectorRegistry:
    """An empty registry of this process' own (Flower's and the process' default metrics are not in it).

    Raises:
        ConfigError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, disable_created_metrics  # noqa: PLC0415  (an extra)
    except ImportError as exc:
        raise ConfigError(
            "metrics_address is set, and prometheus-client is not installed: pip install 'sandfleet[metrics]', "
            "or leave SANDFLEET_METRICS_ADDRESS empty",
            key=_KEY,
        ) from exc
    # A second series of each, which says when it began.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry(auto_describe=True)


class Tally:
    """Counts by name, from any thread. For what is counted seldom; it is there whether or not metrics are on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, name: str, label: str = "", amount: int = 1) -> None:
        """Count ``amount`` more. Both words come from closed sets: every new pair is kept for good."""
        with self._lock:
            self._counts[name, label] = self._counts.get((name, label), 0) + amount

    def of(self, name: str) -> dict[str, int]:
        """label → count of one name."""
        with self._lock:
            return {label: count for (kept, label), count in self._counts.items() if kept == name}


class MetricsServer:
    """Serves ``GET /metrics`` and ``GET /healthz`` from a thread of its own.

    Args:
        address: HOST:PORT as `parse_address` takes it.
        registry: What ``/metrics`` tells.
        healthy: What keeps this process from its work, in a few words; "" when nothing does (else ``/healthz`` is 503).

    Raises:
        ConfigError: The address is malformed, taken or not this machine's.
    """

    def __init__(self, address: str, registry: CollectorRegistry, healthy: Callable[[], str]) -> None:
        host, port = parse_address(address)
        family = type("_Family", (_Server,), {"address_family": 10}) if ":" in host else _Server  # 10: AF_INET6
        try:
            self._server = family((host, port), _Handler)
        except OSError as exc:
            raise ConfigError(
                f"metrics_address {address}: cannot listen on {host} port {port}: {exc.strerror or exc}; "
                "choose another, or port 0 for any free one",
                key=_KEY,
            ) from exc
        self._server.registry, self._server.healthy = registry, healthy
        shown = f"[{host}]" if ":" in host else host
        #: Where it listens, HOST:PORT with the real port.
        self.address = f"{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="sandfleet-metrics", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()
        log.info("metrics.listening", extra={"address": self.address})

    def stop(self) -> None:
        """Stop listening. Safe to repeat, and without `start`."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(timeout=2.0)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    registry: CollectorRegistry
    healthy: Callable[[], str]

    def handle_error(self, request: object, client_address: object) -> None:
        # A client that hung up, or a scrape that failed: never a traceback on stderr.
        log.info("metrics.request_failed", exc_info=log.isEnabledFor(logging.DEBUG))


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SLOWEST_CLIENT_S
    server_version = "sandfleet"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif path == "/healthz":
            why = self.server.healthy()
            self._send(503 if why else 200, f"{why or 'ok'}\n".encode())
        else:
            self._send(404, b"there is /metrics and /healthz\n")

    def _metrics(self) -> None:
        from prometheus_client.exposition import choose_encoder  # noqa: PLC0415  (an extra)

        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encode(self.server.registry)
        except Exception as exc:  # noqa: BLE001  (Redis may be away: the scrape fails, and the process goes on)
            log.warning("metrics.scrape_failed", extra={"error": f"{type(exc).__name__}: {exc}"[:300]})
            self._send(503, b"the metrics cannot be read now\n")
            return
        self._send(200, body, content_type)

    def _send(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """One line per scrape is none too few."""
