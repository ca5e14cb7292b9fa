"""What the architecture tests read: the files of this repository, and the parts of one file."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {
    "sandfleet": ROOT / "shared" / "sandfleet",
    "sandfleet_scheduler": ROOT / "scheduler" / "sandfleet_scheduler",
    "sandfleet_workers": ROOT / "workers" / "sandfleet_workers",
}

# What git ignores by name, for a checkout without git (an unpacked sdist).
NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis", ".import_linter_cache"}


def repository_files() -> list[Path]:
    """Every file that is committed or would be by ``git add -A``, relative to the root, sorted."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return sorted(_walk())
    paths = {Path(name) for name in listed.split("\0") if name}
    return sorted(path for path in paths if (ROOT / path).is_file())


def _walk() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_OURS and not name.endswith("_cache")]
        for name in names:
            yield (Path(folder) / name).relative_to(ROOT)


def package_modules() -> list[Path]:
    """The Python files of the three packages, relative to the root, sorted."""
    return sorted(path.relative_to(ROOT) for folder in PACKAGES.values() for path in folder.rglob("*.py"))


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Each function's dotted name and its length in lines, without its docstring."""
    yield from _functions(ast.parse(source), prefix="")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, _length(child)
        inner = f"{prefix}{child.name}." if isinstance(child, _NAMED) else prefix
        yield from _functions(child, inner)


_NAMED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines
