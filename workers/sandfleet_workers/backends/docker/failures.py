"""Which error it is when the engine does not do as asked."""

from __future__ import annotations

from typing import Any

import docker.errors
import requests

from sandfleet.errors import StartFailed

__all__ = ["away", "failure_of", "how_to_get", "pull_failure"]

_TOLD_CHARS = 500
#: Words in the engine's answer, the reason they stand for and what to do; the first that fits counts.
_KNOWN = (
    (("no space left on device", "disk quota exceeded"), "disk", "free space on the engine's host"),
    (
        (
            "bind source path does not exist",
            "invalid mount config",
            "invalid mount path",
            "statfs",
            "not a shared mount",
        ),
        "bad_mount",
        "what sandboxes see must be at that path on the engine's host: look at the mounts, and at those of the worker",
    ),
    (
        ("unknown or invalid runtime", "runtime name", "invalid runtime", "oci runtime not found"),
        "no_runtime",
        "install the runtime and name it in the engine's daemon.json",
    ),
    (("setting rlimit", "rlimits"), "limits", "lower sandbox.nofile: the engine may not raise it that far"),
    (
        ("exec: ", "executable file not found", "no such file or directory: unknown"),
        "image_unusable",
        "the image lacks what sandboxes need: /bin/sh, or python3 for all operations",
    ),
    (("network", "not found"), "no_network", "name an existing network by sandbox.docker_network"),
    (("mounting", "mount"), "bad_mount", "look at the mounts of the node"),
)
_ALL_WORDS = frozenset({"no_network"})


def failure_of(exc: BaseException, what: str, address: str, facts: dict[str, Any]) -> StartFailed:
    """The error for an exception of the SDK.

    Args:
        exc: What was raised.
        what: What the engine was asked to do.
        address: Where it is.
        facts: More for the error.
    """
    if isinstance(exc, docker.errors.APIError):
        return _refused(exc, what, facts)
    if isinstance(exc, requests.Timeout) or "timed out" in str(exc).lower():
        return StartFailed(
            f"the Docker engine did not {what} in time; it is overloaded or hangs: look at its log",
            reason="timeout",
            **facts,
        )
    return away(address, exc)


def away(address: str, exc: BaseException) -> StartFailed:
    """Nobody answers there."""
    shown = address.rpartition("@")[2] if "@" in address else address
    text = str(exc)
    if "Permission denied" in text or "PermissionError" in text:
        hint = "this user may not use the socket: run the worker as root or in the socket's group"
    elif "No such file" in text or "FileNotFoundError" in text:
        hint = "there is no such socket: install and start Docker, or set sandbox.docker_host (or DOCKER_HOST)"
    else:
        hint = "start it, or set sandbox.docker_host (or DOCKER_HOST)"
    return StartFailed(f"no Docker engine answers at {shown}; {hint}", reason="no_daemon", detail=text[:_TOLD_CHARS])


def _refused(exc: docker.errors.APIError, what: str, facts: dict[str, Any]) -> StartFailed:
    told = " ".join(str(exc.explanation or exc).split())[:_TOLD_CHARS]
    low = told.lower()
    if isinstance(exc, docker.errors.ImageNotFound) or "no such image" in low:
        return no_image(str(facts.get("image") or ""), told)
    if exc.status_code == 409 and ("already in use" in low or ("name" in low and "conflict" in low)):
        return StartFailed(
            f"the Docker engine cannot {what}: another container has that name; remove it, or set "
            f"sandbox.container_prefix ({told})",
            reason="name_conflict",
            **facts,
        )
    for words, reason, hint in _KNOWN:
        found = all(word in low for word in words) if reason in _ALL_WORDS else any(word in low for word in words)
        if found:
            return StartFailed(f"the Docker engine cannot {what}: {told}; {hint}", reason=reason, **facts)
    return StartFailed(f"the Docker engine cannot {what}: {told}", reason="engine_error", **facts)


def how_to_get(image: str) -> str:
    """What to type for an image that is not there."""
    ours = ", or `make images` in a checkout of sandfleet" if image.startswith("sandfleet/") else ""
    return f"`docker pull {image}`, or `docker load` it{ours}"


def no_image(image: str, told: str) -> StartFailed:
    """The image is not there and does not come."""
    return StartFailed(
        f"the image {image} is not on this machine ({told}); {how_to_get(image)}",
        reason="no_image",
        image=image,
    )


def pull_failure(image: str, told: str) -> StartFailed:
    """What the registry or the engine said while the image was pulled."""
    low = told.lower()
    if "no space left" in low:
        return StartFailed(f"the image {image} does not fit on the engine's disk: {told}", reason="disk", image=image)
    if any(word in low for word in ("denied", "unauthorized", "authentication required", "forbidden")):
        return StartFailed(
            f"the registry does not give the image {image} to this node ({told}); check its name, and the credentials "
            "in the Docker config.json that sandbox.registry_config names",
            reason="pull_denied",
            image=image,
        )
    return no_image(image, f"it cannot be pulled: {told}")
