"""Every example in the README and the guides runs as it stands there.

Python blocks are run by a Python of their own against a real fleet; a comment ``# → text`` says what they print. Of the
shell blocks each ``sandfleet`` line is parsed, and run where it ends by itself; ``make`` targets and extras must
exist.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from sandfleet import Settings
from sandfleet.errors import error_codes
from sandfleet.ops import OPS
from sandfleet.stack import Stack
from tests.cli_examples import parse, sandfleet_calls
from tests.services import require

pytestmark = pytest.mark.slow  # `make check` runs it; `make test` has three minutes

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/agent-developer.md", "docs/celery.md", "docs/operator.md")
#: They go on until they are ended, need a terminal or another machine, or take a node away.
NOT_HERE = {"up", "demo", "worker", "scheduler", "flower", "shell", "drain", "completion"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line it begins on, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
SHELL = [block for block in BLOCKS if block.language == "sh"]
YAML = [block for block in BLOCKS if block.language == "yaml"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A fleet as the pages suppose one: with a place for checkpoints."""
    require("redis")
    require("bwrap")
    where = tmp_path_factory.mktemp("checkpoints")
    with Stack(nodes=2, backend="local", lease_s=3.0, checkpoint_url=where.as_uri()) as stack:
        yield stack


@pytest.fixture
def environ(fleet: Stack, tmp_path: Path) -> dict[str, str]:
    """What a reader's terminal has: the fleet's address, and `sandfleet` on PATH."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    program = bin_dir / "sandfleet"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom sandfleet.cli import main\nsys.exit(main())\n")
    program.chmod(0o755)
    mine = {name: value for name, value in os.environ.items() if not name.startswith("SANDFLEET_")}
    return {
        **mine,
        "SANDFLEET_REDIS_URL": fleet.settings.redis_url,
        "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def test_the_pages_have_examples() -> None:
    assert len(PYTHON) >= 10
    assert len(SHELL) >= 5
    assert {block.page for block in BLOCKS} == set(PAGES)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_block_runs_and_prints_what_it_says(block: Block, environ: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block.text],
        capture_output=True, text=True, timeout=50, env=environ, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    at = 0
    for told in re.findall(r"^# → (.*)$", block.text, flags=re.MULTILINE):
        found = done.stdout.find(told, at)
        assert found >= 0, f"{told!r} is not printed, or not in this order:\n{done.stdout}"
        at = found + len(told)


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_block_names_commands_and_options_that_exist(block: Block) -> None:
    for line in block.text.splitlines():
        for call in sandfleet_calls(line):
            parse(call)


@pytest.mark.slow
@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_block_runs(block: Block, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a,b\n1,2\n")
    for line in filter(_runs_here, block.text.splitlines()):
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line}"],
            capture_output=True, text=True, timeout=50, env=environ, cwd=tmp_path, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def _runs_here(line: str) -> bool:
    names = {call[0] for call in sandfleet_calls(line) if call}
    return bool(names) and not names & NOT_HERE and "PASSWORD" not in line


def test_make_targets_and_extras_that_are_named_exist() -> None:
    text = "\n".join(block.text for block in SHELL)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", text, flags=re.MULTILINE)) <= targets
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {extra for found in re.findall(r"sandfleet\[([\w,]+)\]", text) for extra in found.split(",")}
    assert named
    assert named <= set(project["optional-dependencies"])


@pytest.mark.parametrize("block", YAML, ids=str)
def test_configuration_block_loads(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SANDFLEET_") or name == "REDIS_URL"]:
        monkeypatch.delenv(name)
    for name in re.findall(r"\$([A-Z_]+)", block.text):
        monkeypatch.setenv(name, "redis://:PASSWORD@10.0.0.5:6379/0" if "URL" in name else "x")
    file = tmp_path / "sandfleet.yaml"
    file.write_text(block.text)
    monkeypatch.setenv("SANDFLEET_CONFIG", str(file))
    settings = Settings.load()
    assert settings != Settings()
    assert yaml.safe_load(block.text)


def test_error_codes_and_tasks_that_are_named_exist() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \|", (ROOT / "docs" / "operator.md").read_text(), flags=re.MULTILINE)
    assert len(rows) >= 12
    assert set(rows) <= set(error_codes())
    [line] = re.findall(r"^Tasks: (.*?)\. Arguments", (ROOT / "docs" / "celery.md").read_text(), flags=re.DOTALL | re.M)
    named = {name.removeprefix("sandbox.") for name in re.findall(r"`([a-z_.]+)`", line)}
    assert len(named) >= 12
    assert named <= set(OPS)


def test_links_lead_somewhere() -> None:
    broken = []
    for page in [*PAGES, "docs/glossary.md", "docs/differences.md", "docs/cli.md"]:
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not (ROOT / page).parent.joinpath(target).exists():
                broken.append(f"{page} → {target}")
    assert not broken
