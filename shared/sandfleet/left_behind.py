"""What nodes that died leave running: sandboxes of backends that do not end with their node's process."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sandfleet.backends import SandboxBackend
from sandfleet.config import Settings
from sandfleet.errors import SandfleetError
from sandfleet.installed_backends import backend_class

__all__ = ["end_left_behind"]

log = logging.getLogger("sandfleet.left_behind")


def end_left_behind(settings: Settings, node_ids: Iterable[str]) -> int:
    """End what these nodes left, none of which runs any more; how many sandboxes that were.

    A fleet does this itself as long as it has a node. This is for the end of a whole one, with settings as its nodes
    had them. What cannot be ended now is logged, not raised: a next node on the data root ends it.
    """
    dead = sorted(node_ids)
    ended = 0
    for name in settings.offered if dead else ():
        try:
            kind = backend_class(name)
            if kind.leftovers is not SandboxBackend.leftovers:
                ended += _end(kind(settings.model_copy(update={"node_id": dead[0]}), lambda *_: None), set(dead))
        except SandfleetError as exc:
            log.warning("left_behind.kept %s of %s: %s", name, ", ".join(dead), exc)
    return ended


def _end(backend: SandboxBackend, dead: set[str]) -> int:
    try:
        names = [name for node_id, left in backend.leftovers().items() if node_id in dead for name in left]
        for name in names:
            backend.remove_leftover(name)
        return len(names)
    finally:
        backend.close()
