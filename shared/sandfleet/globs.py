"""What searches pass over, and the brackets of a glob, for whoever searches outside sandboxd. Pure."""

from __future__ import annotations

import re

__all__ = ["IGNORE", "one_of"]

#: The same list as sandboxd's; the contract suite compares what both find.
IGNORE = tuple(
    """
    .git .svn .hg .bzr node_modules __pycache__ .venv venv .env env .tox .nox .eggs *.egg-info site-packages
    dist build .next .nuxt .output .turbo target out .idea .vscode *.swp *.swo *~ .project .classpath .settings
    .DS_Store Thumbs.db desktop.ini *.lnk *.log *.tmp *.temp .upload-*.part *.bak *.cache .cache logs .coverage
    coverage .nyc_output htmlcov .pytest_cache .mypy_cache .ruff_cache
    """.split()  # noqa: SIM905  (a list of fifty one-word lines is no easier to compare)
)


def one_of(inner: str, *, negated: bool) -> str:
    """The expression for one character out of ``inner``, in which everything stands for itself but ``a-z``.

    Each character is escaped: some doubled ones (``--``, ``&&``) are to mean sets in later Pythons, which warn of them.
    """
    text, rest = "", inner
    while rest:
        is_range = rest[1:2] == "-" and len(rest) > 2
        text += f"{re.escape(rest[0])}-{re.escape(rest[2])}" if is_range else re.escape(rest[0])
        rest = rest[3 if is_range else 1 :]
    return f"[{'^' if negated else ''}{text}]"
