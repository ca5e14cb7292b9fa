"""The sandboxes that the cases of the catalogue attack. What they can do is in `tests.security.boxes`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.boxes import Box, Boxes, opened, param


@pytest.fixture(scope="module", params=[param("docker"), param("local")])
def boxes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    """Each backend in turn; `tests.security.boxes.on` chooses."""
    with opened(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture
def box(boxes: Boxes) -> Box:
    """A sandbox that a module's cases share."""
    return boxes.box


@pytest.fixture
def neighbour(boxes: Boxes) -> Box:
    """Another thread's sandbox on the same node."""
    return boxes.neighbour
