"""`import sandfleet` is the contract: what is in it is meant, told and sorted."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points, version

import pytest

import sandfleet

# Read with care: a package without `__all__` is one failed test, not a suite that cannot be collected.
PUBLIC = list(getattr(sandfleet, "__all__", []))
CLASSES_AND_FUNCTIONS = [
    name
    for name in PUBLIC
    if inspect.isclass(getattr(sandfleet, name, None)) or inspect.isroutine(getattr(sandfleet, name, None))
]


def test_every_public_name_is_there_once_and_in_order() -> None:
    assert PUBLIC, "sandfleet has no __all__"
    assert sorted(set(PUBLIC), key=_order) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_importable(name: str) -> None:
    assert hasattr(sandfleet, name), f"sandfleet.__all__ promises {name}"


@pytest.mark.parametrize("name", CLASSES_AND_FUNCTIONS)
def test_public_name_says_what_its_caller_gets(name: str) -> None:
    value = getattr(sandfleet, name)
    # Its own words: a class would otherwise answer with its base's, a dataclass with its signature.
    told = (vars(value) if inspect.isclass(value) else {"__doc__": value.__doc__}).get("__doc__") or ""
    assert told.strip(), f"sandfleet.{name} has no docstring"
    assert not told.startswith(f"{name}("), f"sandfleet.{name} has a dataclass's signature for a docstring"


@pytest.mark.parametrize("name", CLASSES_AND_FUNCTIONS)
def test_public_methods_say_what_their_caller_gets(name: str) -> None:
    value = getattr(sandfleet, name)
    if not inspect.isclass(value) or not value.__module__.startswith("sandfleet"):
        return
    silent = [
        member
        for member, function in vars(value).items()
        if not member.startswith("_") and inspect.isfunction(function) and not inspect.getdoc(getattr(value, member))
    ]
    assert not silent, f"sandfleet.{name} has methods without a docstring: {silent}"


def test_nothing_public_is_left_out_of_all() -> None:
    defined_here = {
        name
        for name, value in vars(sandfleet).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("sandfleet")
    }
    assert defined_here <= set(PUBLIC)


@pytest.mark.parametrize("name", ["local", "mock"])
def test_backend_is_found_by_its_entry_point(name: str) -> None:
    [found] = entry_points(group="sandfleet.backends", name=name)
    assert inspect.isclass(found.load())


def test_the_console_script_leads_to_a_function() -> None:
    [found] = entry_points(group="console_scripts", name="sandfleet")
    assert callable(found.load())


def test_installed_version_is_the_one_the_package_tells() -> None:
    assert sandfleet.__version__ == version("sandfleet")


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: the order ruff keeps (RUF022)."""
    if name.isupper():
        return 0, name
    return (1 if name[:1].isupper() else 2), name
