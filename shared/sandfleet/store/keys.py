"""The names of Redis keys that Python code touches; the scripts build the same ones from the prefix."""

from __future__ import annotations

__all__ = ["DEFAULT_PREFIX", "Keys"]

DEFAULT_PREFIX = "sandfleet:"


class Keys:
    """Key names of one deployment."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        self.prefix = prefix

    def reply(self, client: str) -> str:
        return f"{self.prefix}reply:{client}"

    def story(self, key: str) -> str:
        return f"{self.prefix}story:{key}"

    def thread(self, digest: str) -> str:
        return f"{self.prefix}thread:{digest}"

    def sandbox(self, sandbox_id: str) -> str:
        return f"{self.prefix}sandbox:{sandbox_id}"

    def chunk(self, blob_id: str, index: int) -> str:
        return f"{self.prefix}blob:{blob_id}:{index}"

    def op(self, op_id: str) -> str:
        return f"{self.prefix}op:{op_id}"

    def answer(self, op_id: str) -> str:
        return f"{self.prefix}answer:{op_id}"

    def output(self, stream: str) -> str:
        return f"{self.prefix}out:{stream}"

    def parked(self) -> str:
        return f"{self.prefix}parked"

    def line(self) -> str:
        return f"{self.prefix}line"

    def places(self, node_id: str) -> str:
        return f"{self.prefix}places:{node_id}"

    def blanks(self, node_id: str) -> str:
        return f"{self.prefix}blanks:{node_id}"

    def lock(self, name: str) -> str:
        return f"{self.prefix}lock:{name}"
