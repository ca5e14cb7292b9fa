"""Identities and the ids derived from them: who a sandbox belongs to, and what it is called."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

from sandfleet.errors import InvalidArgument

__all__ = [
    "ANONYMOUS_PREFIX",
    "Identity",
    "is_sandbox_id",
    "new_op_id",
    "new_token",
    "resend_id",
    "sandbox_id_candidates",
]

#: DeerFlow's rule for thread ids; `fullmatch`, because ``$`` accepts a trailing newline.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SANDBOX_ID = re.compile(r"[0-9a-f]{8,64}")
_OP_ID = re.compile(r"[A-Za-z0-9_.:-]{1,80}")
_NODE_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")

ANONYMOUS_PREFIX = "anon-"
_MIN_SANDBOX_ID = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a sandbox belongs to: a thread, optionally of a user.

    Raises:
        InvalidArgument: An id is not 1–64 characters of ``A-Z a-z 0-9 _ -``.
    """

    thread_id: str
    user_id: str | None = None

    def __post_init__(self) -> None:
        check_id("thread_id", self.thread_id)
        if self.user_id is not None:
            check_id("user_id", self.user_id)

    @classmethod
    def anonymous(cls, user_id: str | None = None) -> Identity:
        """A fresh identity that nobody else has."""
        return cls(ANONYMOUS_PREFIX + secrets.token_hex(12), user_id)

    @property
    def digest(self) -> str:
        """64 hex digits that no other identity has.

        Without a user it is ``sha256(thread_id)``, so the first eight digits are the sandbox id
        of the seeds. With one, both parts are encoded with their lengths: ("a-b", "c") and
        ("a", "b-c") differ.
        """
        text = self.thread_id
        if self.user_id is not None:
            text = f"{len(self.user_id)}:{self.user_id}/{len(self.thread_id)}:{self.thread_id}"
        return hashlib.sha256(text.encode()).hexdigest()


def check_id(name: str, value: object) -> str:
    """``value`` if it is a usable thread or user id.

    Raises:
        InvalidArgument: Names the argument and the rule.
    """
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        raise InvalidArgument(
            f"{name} must be 1-64 characters of A-Z a-z 0-9 _ -, not {str(value)[:80]!r}", argument=name
        )
    return value


def resend_id(op_id: str, number: int) -> str:
    """The id under which an operation that is known not to have begun is sent again: the same for whoever
    repeats it, and no other operation's."""
    if len(op_id) > 70:
        op_id = f"{op_id[:50]}.{hashlib.sha256(op_id.encode()).hexdigest()[:16]}"
    return f"{op_id}.r{number}"


def check_op_id(value: object) -> str:
    """``value`` if it is a usable op id (1–80 characters of ``A-Za-z0-9_.:-``)."""
    if not isinstance(value, str) or _OP_ID.fullmatch(value) is None:
        raise InvalidArgument(f"op_id must be 1-80 characters of A-Z a-z 0-9 _ . : -, not {str(value)[:90]!r}")
    return value


def check_node_id(value: object) -> str:
    """``value`` if it is a usable node id (a DNS label of up to 48 characters)."""
    if not isinstance(value, str) or _NODE_ID.fullmatch(value) is None:
        raise InvalidArgument(
            f"a node id is 1-48 characters of a-z 0-9 - and starts with a letter or digit, not {str(value)[:60]!r}"
        )
    return value


def is_sandbox_id(value: object) -> bool:
    """Whether ``value`` has the form of a sandbox id: 8–64 lower-case hex digits."""
    return isinstance(value, str) and _SANDBOX_ID.fullmatch(value) is not None


def sandbox_id_candidates(digest: str) -> list[str]:
    """The ids an identity may get, in the order they are tried.

    The seeds' eight digits collide with even odds at 77 000 threads, so a prefix that belongs to
    another identity is extended until it is free. The full digest is always a candidate.
    """
    return [digest[:n] for n in (*range(_MIN_SANDBOX_ID, 24, 4), 32, 64)]


def new_op_id() -> str:
    """A fresh operation id: 32 hex digits, unguessable."""
    return secrets.token_hex(16)


def new_token() -> str:
    """A fresh token for incarnations, clients and locks: 16 hex digits."""
    return secrets.token_hex(8)
