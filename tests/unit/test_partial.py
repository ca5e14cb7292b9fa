"""Answers that tell what is missing are still the lists and pairs they always were."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from sandfleet.calls import entries, glob_answer, grep_answer, names
from sandfleet.client import Answer
from sandfleet.model import Timings
from sandfleet.partial import Listed, Searched

ENTRY = {"path": "/a/b", "name": "b", "type": "dir", "size": 0, "mode": 0o755, "modified_at": 1.0}


def _answer(value: dict[str, object]) -> Answer:
    return Answer("op", value, None, Timings())


def test_a_search_is_a_pair_that_knows_what_it_did_not_search() -> None:
    answer = grep_answer(_answer({"matches": [], "truncated": True, "skipped": {"large": 2}}))
    assert answer == ([], True)
    found, truncated = answer
    assert (found, truncated, answer.skipped) == ([], True, {"large": 2})  # type: ignore[attr-defined]
    assert glob_answer(_answer({"paths": ["/a"], "truncated": False})).skipped == {"errors": 0}  # type: ignore[attr-defined]
    assert Searched([], False).skipped == {}


def test_a_listing_is_a_list_that_counts_what_it_could_not_read() -> None:
    listing = entries(_answer({"entries": [ENTRY], "truncated": False, "errors": 3}), "/a", 2)
    assert names(listing) == ["/a/b/"]
    assert names(listing).unread == 3  # type: ignore[attr-defined]
    assert names([]) == Listed() == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda answer: pickle.loads(pickle.dumps(answer))])
def test_they_can_be_copied_and_pickled_as_lists_and_pairs_can(copied: Any) -> None:
    search = copied(Searched(["/a"], True, {"errors": 1}))
    assert (type(search), search, search.skipped) == (Searched, (["/a"], True), {"errors": 1})
    listing = copied(Listed(["/a"], unread=3))
    assert (type(listing), listing, listing.unread) == (Listed, ["/a"], 3)
