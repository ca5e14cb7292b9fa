"""Versions with known holes: which lines a fix covers, and what a distribution's number does not tell."""

from __future__ import annotations

import pytest

from sandfleet.known_bad import Hole, is_distribution_build, known_holes, parse_version, version_finding

THREE_LINES = Hole("runc", "CVE-1", ("1.2.8", "1.3.3", "1.4.0-rc.3"), "fail", "a way out")


@pytest.mark.parametrize(
    ("version", "bad"),
    [
        ("1.1.12", True),  # a line without a fix
        ("1.2.7", True),
        ("1.2.8", False),
        ("1.2.8-rc.1", True),
        ("1.3.2", True),
        ("1.3.3", False),
        ("1.4.0-rc.2", True),
        ("1.4.0-rc.3", False),
        ("1.4.0", False),
        ("1.5.0-rc.1", False),
        ("2.0.0", False),
    ],
)
def test_each_release_line_has_its_own_fix(version: str, bad: bool) -> None:
    assert THREE_LINES.is_in(parse_version(version)) is bad


def test_a_hole_begins_with_the_version_that_brought_it() -> None:
    hole = Hole("redis", "CVE-2", ("8.6.3",), "warn", "…", since="7.2.0")
    assert [hole.is_in(parse_version(text)) for text in ("7.0.15", "7.2.0", "8.6.2", "8.6.3")] == [
        False, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("1.1.5+ds1", "1.1.12"),
        ("1.9.0", "1.10.0"),
        ("1.4.0-rc.2", "1.4.0-rc.10"),
        ("1.4.0~rc3", "1.4.0"),
        ("1.4.0-beta.9", "1.4.0-rc.1"),
        ("20.10.24+dfsg1", "v29.5.1"),
        ("1.6", "1.6.1"),
    ],
)
def test_versions_compare_by_their_numbers(lower: str, higher: str) -> None:
    assert parse_version(lower) < parse_version(higher)


@pytest.mark.parametrize("text", ["", "unknown", "dev-1.2", "…"])
def test_what_is_no_version_is_refused_and_told_as_such(text: str) -> None:
    with pytest.raises(ValueError, match="no version"):
        parse_version(text)
    assert version_finding("runc", text).status == "warn"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("1.1.5+ds1-1+deb12u1", True),
        ("20.10.24+dfsg1", True),
        ("1.6.20~ds1", True),
        ("28.2.2-0ubuntu1~24.04.1", True),
        ("1.2.5-2.el9", True),
        ("1.3.3-r1", True),
        ("1.3.3", False),
        ("1.4.0-rc.3", False),
        ("v1.2.5-0-g59923ef", False),
        ("5d6db84", False),
    ],
)
def test_a_distribution_is_known_by_its_mark(text: str, is_one: bool) -> None:
    assert is_distribution_build(text) is is_one


def test_a_hole_of_upstream_fails_and_names_the_fix() -> None:
    found = version_finding("runc", "1.1.11", label="docker runc")
    assert (found.name, found.status) == ("docker runc", "fail")
    assert found.advice.startswith("install runc 1.4.3 or newer")
    assert all(cve in found.advice for cve in ("CVE-2024-21626", "CVE-2025-31133", "CVE-2026-41579"))


def test_a_distribution_build_warns_because_it_may_carry_the_fixes() -> None:
    found = version_finding("runc", "1.1.5+ds1", build="1.1.5+ds1-1+deb12u1")
    assert found.status == "warn"
    assert "deb12u1" in found.found
    assert "security tracker" in found.advice
    assert "CVE-2025-31133" in found.advice


def test_a_version_without_holes_is_ok() -> None:
    for component, version in (("runc", "1.4.3"), ("moby", "29.5.1"), ("redis", "8.6.3"), ("valkey", "9.1.2")):
        assert version_finding(component, version).status == "ok", component


def test_every_entry_of_the_file_can_be_compared_and_says_what_it_is() -> None:
    assert {hole.component for hole in known_holes()} >= {"runc", "containerd", "moby", "redis"}
    for hole in known_holes():
        assert hole.fixed, hole
        assert hole.status in ("warn", "fail"), hole
        assert hole.what, hole
        assert hole.id.startswith("CVE-"), hole
        assert hole.is_in(parse_version(hole.since if hole.since != "0" else "0.1")), hole
        assert not hole.is_in(parse_version(max(hole.fixed, key=parse_version))), hole
