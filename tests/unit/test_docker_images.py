"""What a node knows of its images while the engine is slow or away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sandfleet.config.models import ContainerSettings
from sandfleet.errors import StartFailed

images_module = pytest.importorskip("sandfleet_workers.backends.docker.images")


class Api:
    """Answers with the id that it was given; while ``door`` is closed, with nothing."""

    def __init__(self) -> None:
        self.door = threading.Event()
        self.door.set()
        self.asked = 0

    def inspect_image(self, image: str) -> dict[str, str]:
        self.asked += 1
        if not self.door.wait(5):
            raise OSError("timed out")
        return {"Id": f"sha256:{image}"}


class Engine:
    def __init__(self) -> None:
        self.api, self.quick_api = Api(), Api()

    @contextmanager
    def calls(self, what: str, **facts: Any) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise StartFailed(f"cannot {what}", reason="no_daemon", **facts) from exc


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(images_module, "_FRESH_S", 0.0)
    return Engine()


def test_an_engine_that_does_not_answer_holds_up_one_caller_and_not_for_long(engine: Engine) -> None:
    """Blank sandboxes need no engine to be claimed, and the claims of all threads ask for the id."""
    images = images_module.Images(engine, ContainerSettings())
    assert images.id_of("box") == "sha256:box"
    engine.quick_api.door.clear()
    first = threading.Thread(target=images.id_of, args=("box",))
    first.start()
    while not engine.quick_api.asked:
        assert first.is_alive()
    assert [images.id_of("box") for _ in range(3)] == ["sha256:box"] * 3
    assert (engine.api.asked, engine.quick_api.asked) == (1, 1)
    engine.quick_api.door.set()
    first.join(5)


def test_an_engine_that_is_away_is_not_asked_with_every_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    images = images_module.Images(engine, ContainerSettings())
    assert images.id_of("box") == "sha256:box"

    def away(image: str) -> dict[str, str]:
        engine.quick_api.asked += 1
        raise OSError("refused")

    monkeypatch.setattr(engine.quick_api, "inspect_image", away)
    assert images.id_of("box") == "sha256:box"
    monkeypatch.setattr(images_module, "_FRESH_S", 60.0)
    assert images.id_of("box") == "sha256:box"
    assert engine.quick_api.asked == 1


def test_an_engine_that_never_answered_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(image: str) -> dict[str, str]:
        raise OSError("refused")

    monkeypatch.setattr(engine.api, "inspect_image", away)
    with pytest.raises(StartFailed):
        images_module.Images(engine, ContainerSettings()).id_of("box")
