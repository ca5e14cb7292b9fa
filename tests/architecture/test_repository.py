"""Rules about the files themselves: their places, their names, their lengths, what they may not say."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.architecture.repository import PACKAGES, ROOT, functions, package_modules, repository_files

LONGEST_FILE = 400
LONGEST_FUNCTION = 50

# path -> why it may be longer. An entry that is no longer needed fails, so the list only shrinks.
LONG_FILES = {
    "shared/sandfleet/errors.py": "one closed tree of small classes; a reader wants it on one page",
    "workers/sandfleet_workers/sandboxd/sandboxd.py": "one file by design: mounted into images as it is",
}
# "path::function" -> why it may be longer.
LONG_FUNCTIONS: dict[str, str] = {}

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
CODE_FOLDERS = {"scheduler", "shared", "tests", "workers"}


def test_the_top_level_has_the_folders_that_were_fixed() -> None:
    missing = [name for name in sorted(CODE_FOLDERS) if not (ROOT / name).is_dir()]
    missing += [name for name in ("pyproject.toml", "README.md") if not (ROOT / name).is_file()]
    assert not missing


def test_python_code_lies_in_the_four_folders_only() -> None:
    stray = [str(path) for path in repository_files() if path.suffix == ".py" and path.parts[0] not in CODE_FOLDERS]
    assert not stray


def test_each_folder_holds_its_one_package() -> None:
    for name, folder in PACKAGES.items():
        inside = {path.parts[1] for path in repository_files() if path.parts[0] == folder.parent.name}
        assert inside == {name}
        assert (folder / "py.typed").is_file(), f"{name} does not tell type checkers that it is typed"


def test_no_file_is_named_after_nothing() -> None:
    vague = [str(path) for path in repository_files() if set(re.split(r"[._-]", path.name)) & VAGUE_NAMES]
    vague += [str(path) for path in repository_files() if set(path.parts[:-1]) & VAGUE_NAMES]
    assert not vague


def test_no_file_is_too_long() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in package_modules()}
    long = {path: length for path, length in lengths.items() if length > LONGEST_FILE}
    assert set(long) - set(LONG_FILES) == set(), long
    assert set(LONG_FILES) - set(long) == set(), "no longer too long: take it off LONG_FILES"


def test_no_function_is_too_long() -> None:
    exempt = {name.partition("::")[0] for name in LONG_FILES}
    long = {
        f"{path}::{name}": length
        for path in package_modules()
        if str(path) not in exempt
        for name, length in functions((ROOT / path).read_text())
        if length > LONGEST_FUNCTION
    }
    assert set(long) - set(LONG_FUNCTIONS) == set(), long
    assert set(LONG_FUNCTIONS) - set(long) == set(), "no longer too long: take it off LONG_FUNCTIONS"


def test_the_readme_begins_with_the_two_commands_and_make_knows_them() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:30]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in ("demo", "test"):
        assert any(re.match(rf"make {target}\b", line) for line in first_screen), f"no line `make {target}`"
        assert target in targets


@pytest.mark.parametrize("path", ["requirements.lock", "images/service/requirements.lock"])
def test_the_lock_holds_every_package_by_hash_and_names_no_index(path: str) -> None:
    lock = (ROOT / path).read_text()
    entries = re.findall(r"^[a-z0-9](?:[^\n]*\\\n)*[^\n]*", lock, flags=re.MULTILINE)
    assert len(entries) > 20
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert re.findall(r"^--.*|.*://.*|.* @ .*", lock, flags=re.MULTILINE) == []


def test_the_service_image_holds_nothing_that_the_tests_did_not_run_with() -> None:
    def pins(path: str) -> set[str]:
        return set(re.findall(r"^[a-z0-9][^ ]*==[^ ]+", (ROOT / path).read_text(), flags=re.MULTILINE))

    assert len(pins("images/service/requirements.lock")) > 30
    assert pins("images/service/requirements.lock") <= pins("requirements.lock"), "type: make lock"


@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".ci").iterdir()))
def test_script_is_executable(path: str) -> None:
    assert os.access(ROOT / path, os.X_OK)


def test_no_committed_file_names_this_machine_or_a_package_index() -> None:
    told = re.compile("|".join(_machine_patterns()))
    found = [
        f"{path}:{number}: {line.strip()[:120]}"
        for path in repository_files()
        for number, line in enumerate(_lines(ROOT / path), start=1)
        if told.search(line)
    ]
    assert not found


def _machine_patterns() -> list[str]:
    # Put together here, so that this file passes its own test.
    hosts = [".".join(labels) for labels in (("files", "pythonhosted", "org"), ("pypi", "org"))]
    patterns = [re.escape(host) for host in hosts]
    patterns += [r"https?://[^\s\"'`)>]*/simple\b", r"/(root|home/\w+|Users/\w+)/\.(pyenv|cache|local)\b"]
    places = [str(ROOT)] + [
        place
        for name, value in os.environ.items()
        if re.match(r"(PIP|UV)_.*(INDEX|FIND_LINKS)", name)
        for place in value.split()
    ]
    places += [path for path in (sys.base_prefix,) if Path(path).is_relative_to(Path.home())]
    # A short path, such as a checkout at /app, is a word that files may use for something else.
    patterns += [re.escape(place) for place in places if place.count("/") > 1]
    return patterns


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
