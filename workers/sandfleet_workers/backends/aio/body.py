"""What a container of an AIO image may be: sandfleet's usual container, but for what such an image needs. Pure.

Its server starts as root, makes its user's directories and gives up root for whatever it runs. So it keeps the five
capabilities that takes (the same that DeerFlow leaves it), and its root file system is writable. It can gain no others:
``no-new-privileges`` and the engine's seccomp filter hold, and so do all limits.

"No network" means a network without a way out: its port must be reachable from the node. The engine drops what would
leave it; what listens on the node's own addresses can be reached from inside.
"""

from __future__ import annotations

from typing import Any

from sandfleet_workers.backends.docker.hostconfig import Place, container_body
from sandfleet_workers.backends.docker.policy import Policy

__all__ = ["CAPABILITIES", "aio_body"]

#: An address for documentation, which nobody has. Without it the engine itself would ask the host's resolver for
#: containers of a network without a way out (CVE-2024-29018), and a name is a message.
_NO_RESOLVER = "192.0.2.1"

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")


def aio_body(policy: Policy, place: Place, *, hostname: str) -> dict[str, Any]:
    """The body of ``POST /containers/create``.

    Args:
        policy: As for other containers; its user is nobody here, the image decides that.
        place: Its entrypoint is not read: the image's own runs.
        hostname: By which the server is known; nobody else's.
    """
    body = container_body(policy, place)
    del body["Entrypoint"], body["Cmd"]
    body["User"] = "0:0"
    body["Hostname"] = hostname
    body["Env"] = [f"{name}={value}" for name, value in sorted(place.env.items())]
    host = body["HostConfig"]
    host["CapAdd"] = list(CAPABILITIES)
    host["ReadonlyRootfs"] = False
    # What the image keeps there must not be hidden.
    host["Tmpfs"] = {}
    if policy.network_mode == "none":
        host["Dns"] = [_NO_RESOLVER]
    return body
