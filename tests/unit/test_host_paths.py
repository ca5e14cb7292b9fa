"""Translation and masking of host mode's paths, both ways."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet_workers.backends.host_paths import Mapping, PathMap, unsafe_in_commands

DATA = "/srv/sf/threads/t1/user-data"
REAL = "/mnt-7/real/threads/t1/user-data"
PATHS = PathMap(
    [
        Mapping("/mnt/user-data", DATA, resolved=REAL),
        Mapping("/workspace", f"{DATA}/workspace", resolved=f"{REAL}/workspace", alias=True),
        Mapping("/mnt/skills", "/opt/agent/skills", read_only=True),
        Mapping("/mnt/data", "/data"),
        Mapping("/mnt/data/inner", "/srv/other/inner"),
        Mapping("/tmp", "/run/sf/n1/s/tmp"),
    ]
)
HOSTS = sorted(PATHS.masks, key=len, reverse=True)
#: Hosts that nothing else looks like: these may appear nowhere, whatever stands around them.
DEEP = [host for host in HOSTS if host.count("/") >= 3]


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("cat /mnt/user-data/workspace/f", f"cat {DATA}/workspace/f"),
        ("ls /mnt/user-data", f"ls {DATA}"),
        ("ls /workspace", f"ls {DATA}/workspace"),
        ("ls ./workspace src/workspace a/tmp", "ls ./workspace src/workspace a/tmp"),
        ("ls /mnt/user-database /mnt/user-data-old /mnt/user-data.bak", None),
        ("ls '/mnt/user-data/a b' \"/mnt/user-data\"", f"ls '{DATA}/a b' \"{DATA}\""),
        ("PATH=/mnt/user-data/a:/mnt/user-data/b:$PATH x", f"PATH={DATA}/a:{DATA}/b:$PATH x"),
        ("run -v /mnt/data:/mnt/skills --x=/mnt/user-data/y", f"run -v /data:/opt/agent/skills --x={DATA}/y"),
        ("gcc -I/mnt/user-data/include -L/tmp", f"gcc -I{DATA}/include -L/run/sf/n1/s/tmp"),
        ("x</mnt/user-data/in>/mnt/user-data/out;(cd /tmp)", f"x<{DATA}/in>{DATA}/out;(cd /run/sf/n1/s/tmp)"),
        ("curl https://h/mnt/user-data/x?f=/tmp >/tmp/y", "curl https://h/mnt/user-data/x?f=/tmp >/run/sf/n1/s/tmp/y"),
        ("cat /backup/mnt/user-data/f ${X}/mnt/user-data", None),
        ("cat /mnt/data/inner/x /mnt/data/inner2", "cat /srv/other/inner/x /data/inner2"),
        ("printf 'a\\n/mnt/user-data\\n'", f"printf 'a\\n{DATA}\\n'"),
        ("curl -d @/mnt/user-data/body", f"curl -d @{DATA}/body"),
        ("echo nothing to do", None),
    ],
)  # fmt: skip
def test_paths_in_a_command_line_are_translated_whole_or_not_at_all(command: str, runs: str | None) -> None:
    assert PATHS.translate(command) == (command if runs is None else runs)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"{DATA}/workspace/f", "/mnt/user-data/workspace/f"),
        (f"{REAL}/workspace/f", "/mnt/user-data/workspace/f"),
        (f"{DATA}", "/mnt/user-data"),
        (f"in {DATA}.", "in /mnt/user-data."),
        (f"{DATA}base {DATA}-old {DATA}.bak {DATA}2", None),
        (f"{DATA}/a:{REAL}/b:/usr/bin", "/mnt/user-data/a:/mnt/user-data/b:/usr/bin"),
        (f"['{DATA}/x', \"{DATA}\"]", "['/mnt/user-data/x', \"/mnt/user-data\"]"),
        (f"file://{DATA}/x", "file:///mnt/user-data/x"),
        (f"\x1b[01;34m{DATA}\x1b[0m", "\x1b[01;34m/mnt/user-data\x1b[0m"),
        (f"'a\\n{DATA}/x'", "'a\\n/mnt/user-data/x'"),
        ("/var/data/x src/data/y ./data", None),
        ("/data/x -I/data \x1b[1m/data\x1b[0m file:///data/z", "/mnt/data/x -I/mnt/data \x1b[1m/mnt/data\x1b[0m file:///mnt/data/z"),
        ("/database /data.bak /data-2", None),
        (f"«{DATA}» {DATA}…", "«/mnt/user-data» /mnt/user-data…"),
    ],
)  # fmt: skip
def test_host_paths_in_output_are_masked_whole_or_not_at_all(said: str, shown: str | None) -> None:
    assert PATHS.mask(said) == (said if shown is None else shown)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (json.dumps(f"{DATA}/x").replace("/", "\\/"), json.dumps("/mnt/user-data/x").replace("/", "\\/")),
        (json.dumps(f"/srv/ü/x {DATA}"), '"/mnt/odd/x /mnt/user-data"'),
        (quote("/srv/ü/x"), "/mnt/odd/x"),
        (quote(f"{DATA}/x", safe=""), quote("/mnt/user-data/x", safe="")),
        (quote(f"?f={DATA}", safe="?=").replace("%2F", "%2f"), "?f=%2fmnt%2fuser-data"),
        ("?f=%2Fdata&g=x%2Fdata", "?f=%2Fmnt%2Fdata&g=x%2Fdata"),
        (r'"\/data\/x" "a\/data"', r'"\/mnt\/data\/x" "a\/data"'),
    ],
)
def test_host_paths_are_masked_as_json_and_urls_write_them(said: str, shown: str) -> None:
    assert PathMap([*PATHS.mappings, Mapping("/mnt/odd", "/srv/ü")]).mask(said) == shown


def test_what_lies_above_the_sandboxs_directories_is_hidden_too() -> None:
    paths = PathMap(PATHS.mappings, {"/srv/sf/threads/t1": "/mnt", "/srv/sf": "/.sandfleet/data"})
    assert (
        paths.mask("/srv/sf/threads/t1 /srv/sf/threads/t2/f /srv/sfx") == "/mnt /.sandfleet/data/threads/t2/f /srv/sfx"
    )
    assert paths.mask(DATA) == "/mnt/user-data"
    assert paths.to_host("/.sandfleet/data") is None


CUT = "\n... [9 bytes discarded] ...\n"


@given(st.integers(1, 200), st.integers(1, 200), st.booleans())
def test_of_a_path_that_was_cut_nothing_is_left(head: int, tail: int, ends: bool) -> None:
    whole = f"see {DATA}/workspace/f and {REAL}\n"
    text = whole[:head] + CUT + whole[-tail:]
    shown = PATHS.mask_cut(text, ends=ends)
    for part in ("/srv", "/mnt-7", "/threads", "/t1", "real/"):
        assert part not in shown
    assert PATHS.mask_cut(whole[:head], ends=True) in PATHS.mask(whole)
    assert CUT in shown


def test_output_that_was_not_cut_keeps_its_end() -> None:
    assert PATHS.mask_cut("ls /srv", ends=False) == "ls /srv"
    assert PATHS.mask_cut("ls /srv", ends=True) == "ls "
    assert PATHS.mask_cut(f"at {DATA}", ends=True) == "at /mnt/user-data"
    assert PATHS.mask_cut("a" + CUT + "a b", ends=False) == "a" + CUT + "a b"


def test_texts_in_a_json_value_are_masked_and_keys_are_not() -> None:
    value = {DATA: [f"{DATA}/x", 3, None, {"path": DATA}]}
    assert PATHS.mask_all(value) == {DATA: ["/mnt/user-data/x", 3, None, {"path": "/mnt/user-data"}]}


def test_the_longest_prefix_decides_at_the_end_of_a_component() -> None:
    assert PATHS.to_host("/mnt/data/inner/x") == "/srv/other/inner/x"
    assert PATHS.to_host("/mnt/data/inner2/x") == "/data/inner2/x"
    assert PATHS.to_host("/mnt/database") is None
    assert PATHS.to_host("/mnt") is None
    assert PATHS.to_host("/workspace/../tmp/x") == "/run/sf/n1/s/tmp/x"
    assert PATHS.roots == ["/mnt/data", "/mnt/data/inner", "/mnt/skills", "/mnt/user-data", "/tmp"]
    assert PathMap([]).mask(DATA) == DATA == PathMap([]).translate(DATA)


@pytest.mark.parametrize(
    ("path", "unsafe"),
    [("/srv/sf/t-1_2.3", False), ("/srv/ü", False), ("/with space", True), ("/a:b", True), ("/a$b", True), ("/", True)],
)
def test_host_paths_that_a_shell_would_read_otherwise_are_told(path: str, unsafe: bool) -> None:
    assert unsafe_in_commands(path) is unsafe


# --- properties ------------------------------------------------------------------------------

NAMES = st.text("abcXYZ09_", min_size=1, max_size=6)
#: What a path may begin after. ``)`` is missing: in ``$(pwd)/tmp`` a path goes on.
DELIMITERS = st.sampled_from(
    [" ", "\n", "\t", ":", "=", '"', "'", "`", ";", "&", "|", "<", ">", "(", ",", "", "[", "{", "@"]
)
VIRTUAL = st.builds(
    lambda root, rest: "/".join([root, *rest]),
    st.sampled_from(["/mnt/user-data", "/mnt/user-data/workspace", "/mnt/skills", "/mnt/data/inner", "/tmp"]),
    st.lists(NAMES, max_size=3),
)  # fmt: skip
#: A virtual path between delimiters; the last delimiter of one is the first of the next, and is never empty there.
CONTEXTS = st.lists(st.tuples(VIRTUAL, DELIMITERS.filter(bool)), min_size=1, max_size=5)


def _joined(contexts: list[tuple[str, str]], start: str) -> str:
    return start + "".join(path + delimiter for path, delimiter in contexts)


@settings(max_examples=400)
@given(CONTEXTS, DELIMITERS)
def test_no_host_path_is_left_in_output_that_holds_translated_paths(
    contexts: list[tuple[str, str]], start: str
) -> None:
    shown = PATHS.mask(PATHS.translate(_joined(contexts, start)))
    assert not [host for host in DEEP if host in shown]
    resolved = PATHS.translate(_joined(contexts, start)).replace(DATA, REAL)
    assert not [host for host in DEEP if host in PATHS.mask(resolved)]


@settings(max_examples=400)
@given(CONTEXTS, DELIMITERS)
def test_masking_undoes_translating(contexts: list[tuple[str, str]], start: str) -> None:
    text = _joined(contexts, start)
    translated = PATHS.translate(text)
    assert PATHS.mask(translated) == text
    assert len(re.findall("|".join(map(re.escape, HOSTS)), translated)) >= len(contexts)


@settings(max_examples=300)
@given(st.text())
def test_a_text_without_roots_is_left_alone(text: str) -> None:
    if not any(host in text for host in HOSTS):
        assert PATHS.mask(text) == text
    if "/mnt/" not in text and "/workspace" not in text and "/tmp" not in text:
        assert PATHS.translate(text) == text


@settings(max_examples=300)
@given(st.sampled_from(HOSTS), st.from_regex(r"\.{0,2}[\w-][\w./-]{0,5}", fullmatch=True), DELIMITERS, DELIMITERS)
def test_siblings_are_left_alone(host: str, suffix: str, before: str, after: str) -> None:
    text = before + host + suffix + after
    if not any(other != host and other in text for other in HOSTS):
        assert PATHS.mask(text) == text
    virtual = PATHS.masks[host]
    if not any(root != virtual and root in virtual + suffix for root in PATHS.roots):
        assert PATHS.translate(before + virtual + suffix) == before + virtual + suffix
