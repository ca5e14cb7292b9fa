"""SECURITY.md promises nothing that no test holds."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: The cases that containers must withstand; the catalogue's numbers.
MUST_HOLD = {
    "E": {1, 2, 3, 4, 7, 9, 10, 12, 13, 15},
    "F": {1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    "R": {1, 2, 3, 6, 7, 8, 9},
    "N": {1, 2, 3, 7, 8},
    "C": {6, 7, 8, 17, 20},
}
#: How many cases the catalogue has; each has a row, be it one that says that it does not hold.
CATALOGUE = {"F": 17, "E": 15, "R": 12, "N": 9, "C": 20}


@cache
def rows() -> list[list[str]]:
    """The cells of every row that names a case."""
    lines = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line[1:].rstrip().removesuffix("|").split("|")] for line in lines]
    return [row for row in cells if len(row) == 7 and row[0] != "case"]


@cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / "tests" / path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(each.name for each in functions if each.name.startswith("test_"))


def named(case: str) -> list[list[str]]:
    return [row for row in rows() if case in re.split(r"[,\s]+", row[0])]


@pytest.mark.parametrize("case", [f"{letter}{n}" for letter, most in CATALOGUE.items() for n in range(1, most + 1)])
def test_each_case_of_the_catalogue_has_one_row(case: str) -> None:
    assert len(named(case)) == 1


@pytest.mark.parametrize("case", [f"{letter}{n}" for letter, numbers in MUST_HOLD.items() for n in sorted(numbers)])
def test_what_must_hold_is_tested_under_its_number(case: str) -> None:
    (row,) = named(case)
    assert row[4].startswith("yes"), "it holds for containers"
    files = re.findall(r"`(security/\w+\.py)", row[3])
    found = [name for path in files for name in functions_of(path) if re.match(rf"test_{case}_", name, re.IGNORECASE)]
    assert found, row


def test_every_test_that_is_named_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for path, function in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
        assert function in functions_of(path), f"{path}::{function}"
    for row in rows():
        for path in re.findall(r"`([\w/]+\.py)`", row[3]):
            cases = [case.lower() for case in re.split(r"[,\s]+", row[0])]
            assert any(f"_{case}_" in name.lower() for name in functions_of(path) for case in cases), (row[0], path)


def test_what_holds_names_its_test() -> None:
    for row in rows():
        assert row[3] or "not in this version" in row[2] or row[4] == "no", row[0]
        assert all(re.match(r"yes|same|partly|no|–", cell) for cell in row[4:]), row
