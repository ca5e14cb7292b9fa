"""What a node keeps of a container so that its next run finds it again, and nobody else's in its place. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sandfleet.errors import StartFailed

__all__ = ["Ticket"]

_VERSION = 1
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Ticket:
    """A running container, and how to reach and know it. Holds secrets.

    Attributes:
        name: Of the container; what `remove_leftover` takes.
        container: Its id.
        started_at: When it started, in the engine's words: after another start it is not the same sandbox.
        pid: Its process 1, as the engine's host numbers it.
        image: The name its image had.
        image_id: The image itself.
        transport: ``unix``, ``tcp`` or ``exec``.
        run_dir: Where its socket lies; removed with it.
        user_data: What it sees of its thread, or of nobody.
        network: The engine's name for its network.
        port: Where sandboxd listens there; None: at the socket.
        user: Whom operations run as, with ``exec``.
        key: What sandboxd proves to know, in hex.
        token: What it asks of us.
        env: Of every command, with ``exec``; else sandboxd knows it.
    """

    name: str
    container: str
    started_at: str
    pid: int
    image: str
    image_id: str
    transport: str
    run_dir: str
    user_data: str
    network: str
    port: int | None
    user: str
    key: str = field(default="", repr=False)
    token: str | None = field(default=None, repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_wire(self) -> dict[str, Any]:
        """JSON form."""
        return {"v": _VERSION, **asdict(self)}

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Ticket:
        """The ticket of its JSON form.

        Raises:
            StartFailed: ``reason`` unreachable: it is none, or one that this version does not understand.
        """
        given: dict[str, Any] = {each.name: data.get(each.name) for each in fields(cls)}
        try:
            if data.get("v") == _VERSION and _is_whole(given):
                return cls(**given)
        except ValueError:  # a key that is no hex
            pass
        raise StartFailed("the journal's ticket of the sandbox cannot be understood", reason="unreachable")


def _is_whole(given: Mapping[str, Any]) -> bool:
    texts = ("name", "container", "started_at", "image", "image_id", "transport", "network", "user", "key")
    env, token, port = given["env"], given["token"], given["port"]
    return (
        all(isinstance(given[name], str) for name in texts)
        and all(isinstance(given[name], str) and Path(given[name]).is_absolute() for name in ("run_dir", "user_data"))
        and isinstance(given["pid"], int)
        and (port is None or isinstance(port, int))
        and (token is None or isinstance(token, str))
        and isinstance(env, Mapping)
        and all(isinstance(each, str) for pair in env.items() for each in pair)
        and (given["transport"] == "exec" or (given["transport"] == "unix") is (port is None))
        and given["transport"] in ("unix", "tcp", "exec")
        and (given["transport"] == "exec" or len(bytes.fromhex(given["key"])) == _KEY_BYTES)
    )
