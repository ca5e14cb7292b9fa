"""The Celery application that every process of the fleet shares, and its routes.

Set up for this job (reference: DESIGN, "Celery, set up for this job"): JSON only, one LPUSH per publish,
no acknowledgement emulation (a killed worker must not leave messages invisible for an hour; op records do
that job), no gossip, no mingle, no beat.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from celery import Celery
from kombu import Exchange, Queue

from sandfleet.config import Settings
from sandfleet.config.sentinel import SCHEME, parse_sentinels
from sandfleet.connection import check_url, sentinel_options
from sandfleet.errors import ConfigError
from sandfleet.ops import OPS, task_name
from sandfleet.wire import OPS_QUEUE, SCHEDULER_QUEUE

__all__ = ["celery_app", "queue_of"]

_SHARED = {task_name(kind): OPS_QUEUE for kind in OPS}
_SCHEDULER = {"scheduler.acquire": SCHEDULER_QUEUE, "scheduler.serve": SCHEDULER_QUEUE}


def queue_of(name: str) -> Queue:
    """A queue as producers pass it: default exchange, nothing declared, so a publish is exactly one LPUSH
    and writes no ``_kombu.binding.*`` key (and survives FLUSHALL)."""
    return Queue(name, Exchange(""), routing_key=name, no_declare=True)


def celery_app(settings: Settings | None = None, *, name: str = "sandfleet") -> Celery:
    """An app whose ``send_task("sandbox.execute_command", kwargs={"thread_id": …, "command": …})`` works.

    Routes: every operation goes to the shared queue ``sandfleet.ops``, where a scheduler acquires the sandbox, records
    the operation and forwards the task to its node. (Straight to the node it would travel unrecorded, and a node
    that dies could not be answered for.)

    Raises:
        InsecureRedis: The Redis URL is neither loopback nor has a password.
        ConfigError: The URL is not one Celery can use.
    """
    settings = settings or Settings.load()
    check_url(settings.redis_url, allow_insecure=settings.allow_insecure_redis)
    url, by_sentinel = _broker_url(settings.redis_url), _sentinel_transport(settings.redis_url)
    app = Celery(name, broker=url, backend=url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        result_serializer="json",
        accept_content=["json"],
        result_accept_content=["json"],
        task_default_queue=OPS_QUEUE,
        # A plain caller's chord or chain may go on to any queue of theirs.
        task_create_missing_queues=True,
        task_routes=(_route,),
        task_ignore_result=False,
        task_store_errors_even_if_ignored=False,
        task_track_started=False,
        task_acks_late=False,
        task_send_sent_event=False,
        result_expires=3600,
        worker_prefetch_multiplier=0,
        worker_send_task_events=settings.task_events,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "ack_emulation": False,
            "priority_steps": [0],
            "socket_keepalive": True,
            "socket_connect_timeout": 3,
            "socket_timeout": 10,
            "health_check_interval": 10,
            **by_sentinel,
        },
        result_backend_transport_options={"retry_policy": {"timeout": 5.0}, **by_sentinel},
    )
    if set(app.conf.accept_content) != {"json"}:
        raise ConfigError(
            "accept_content must stay ['json']; anything else lets a message run code", key="accept_content"
        )
    return app


def _broker_url(url: str) -> str:
    """The URL as kombu spells it: a socket has a scheme of its own there, and its database another name."""
    if url.startswith(SCHEME):
        return parse_sentinels(url).as_celery_spells_it()
    parts = urlsplit(url)
    if parts.scheme != "unix":
        return url
    query = [("virtual_host" if name == "db" else name, value) for name, value in parse_qsl(parts.query)]
    return f"redis+socket://{parts.netloc}{parts.path}" + (f"?{urlencode(query)}" if query else "")


def _sentinel_transport(url: str) -> dict[str, Any]:
    """What broker and result backend must know beside their URL when Sentinels say where Redis is."""
    if not url.startswith(SCHEME):
        return {}
    found = parse_sentinels(url)
    return {"master_name": found.service, "sentinel_kwargs": sentinel_options(found)}


def _route(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **_: Any) -> dict[str, Any] | None:
    queue = _SHARED.get(name) or _SCHEDULER.get(name)
    return None if queue is None else {"queue": queue_of(queue)}
