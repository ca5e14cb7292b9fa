"""Getting a connection to exactly one AIO server and to nobody else's."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sandfleet_workers.endpoint_http import Request, post
from sandfleet_workers.endpoint_socket import TcpEndpoint

__all__ = ["AioEndpoint"]


@dataclass(slots=True)
class AioEndpoint(TcpEndpoint):
    """An AIO server's port. It has no key to prove itself with; ``key`` is the name of its host, which is unique.

    An address may belong to another container tomorrow, so every connection asks for that name first.
    """

    chunked: ClassVar[bool] = True

    def hello(self, challenge: str) -> Request:
        return post("/v1/file/read", {"file": "/etc/hostname"}, effect=False)

    def proves(self, challenge: str, answer: Mapping[str, Any]) -> bool:
        told = answer.get("content")
        return isinstance(told, str) and hmac.compare_digest(told.strip().encode("utf-8", "replace"), self.key)
