"""What effects left on the disks of the data roots, read without the product."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Evidence", "read_evidence"]

#: Files in a workspace with one line per effect.
JOURNAL, APPENDS, REPLACED, FILES = "journal", "appends", "replaced", "files"


@dataclass
class Evidence:
    """Traces by effect id, over all data roots."""

    #: How often an effect happened: of commands the different nonces, of appends and replacements the most lines that
    #: one data root has of it.
    times: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    #: Files by name → how often the id stands in them; the largest of all data roots.
    files: dict[str, int] = field(default_factory=dict)
    #: What stands in a file and is no trace, or only half of one.
    torn: list[str] = field(default_factory=list)
    #: Conversations with data on more than one data root.
    on_several: list[str] = field(default_factory=list)

    def count(self, trace: str, effect: str) -> int:
        """How often the effect left its trace."""
        return int(effect in self.files) if trace == FILES else self.times[trace][effect]


def read_evidence(data_roots: Iterable[Path]) -> Evidence:
    """All traces of all conversations below these data roots."""
    found = Evidence()
    nonces: dict[str, set[str]] = defaultdict(set)
    homes: Counter[str] = Counter()
    for root in data_roots:
        lines: dict[str, Counter[str]] = {APPENDS: Counter(), REPLACED: Counter()}
        for workspace in sorted(root.glob("threads/*/user-data/workspace")):
            conversation = workspace.parents[1].name
            homes[conversation] += 1
            _read_journal(workspace / JOURNAL, nonces, found)
            for name in (APPENDS, REPLACED):
                for line in _lines(workspace / name):
                    lines[name][line] += 1
            _read_files(workspace / FILES, found)
        for name, counted in lines.items():
            for effect, times in counted.items():
                found.times[name][effect] = max(times, found.times[name][effect])
    for effect, different in nonces.items():
        found.times[JOURNAL][effect] = len(different)
    found.on_several = sorted(name for name, roots in homes.items() if roots > 1)
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def _read_journal(path: Path, nonces: dict[str, set[str]], found: Evidence) -> None:
    seen = set()
    for line in _lines(path):
        effect, _, nonce = line.partition(" ")
        if not nonce:
            found.torn.append(f"{path}: {line!r}")
        elif line in seen:
            nonces[effect].add(f"{nonce} again")  # the same line twice in one file is no copy of data
        else:
            nonces[effect].add(nonce)
        seen.add(line)


def _read_files(folder: Path, found: Evidence) -> None:
    for path in sorted(folder.glob("*")):
        if path.name.startswith("."):
            continue  # a write that was cut short before its file got its name
        lines = _lines(path)
        if any(line != path.name for line in lines):
            found.torn.append(f"{path}: {next(line for line in lines if line != path.name)!r}")
        found.files[path.name] = max(lines.count(path.name), found.files.get(path.name, 0))
