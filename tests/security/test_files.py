"""Attacks on files and paths (catalogue F1-F5, F7-F9, F12-F15), carried out with the client against whole fleets.

The enemy is in the sandbox and prepares the ground; the victim is whoever opens what lies there: the node, the client,
another caller. No case may give or change a byte of the host.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandfleet import Sandbox, SandboxProvider
from sandfleet.client import Call
from sandfleet.errors import NoMatch, SandfleetError
from sandfleet.trees import remove_tree
from tests.security.boxes import as_root
from tests.security.grounds import CANARY, GROUNDS, WORK, Ground, by_exec, everywhere, ground
from tests.services import wait_until

pytestmark = pytest.mark.slow

THREAD, NEIGHBOUR = "files", "neighbour"
UPLOADS, OUTPUTS = "/mnt/user-data/uploads", "/mnt/user-data/outputs"
MIB = 1024**2


@pytest.fixture(scope="module", params=GROUNDS)
def field(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


@pytest.fixture
def sandbox(field: Ground) -> Iterator[Sandbox]:
    """The attacker's sandbox, emptied; afterwards the host is as it was and a neighbour is served."""
    made = field.sandbox(THREAD)
    made.run(
        f"cd / && chmod -R u+rwX {WORK} {UPLOADS} {OUTPUTS}; rm -rf {WORK}/* {WORK}/.[!.]* {UPLOADS}/* {OUTPUTS}/*"
    )
    yield made
    field.assert_untouched()
    assert field.sandbox(NEIGHBOUR).run("echo served").stdout == "served\n"


READS: dict[str, Callable[[Sandbox, str], object]] = {
    "read_file": lambda s, p: s.read_file(p),
    "read_text": lambda s, p: s.read_text(p),
    "download_file": lambda s, p: s.download_file(p),
    "list_files": lambda s, p: s.list_files(p),
    "glob": lambda s, p: s.glob(p, "**/*"),
    "grep": lambda s, p: s.grep(p, "."),
    "stat": lambda s, p: s.stat(p),
}
WRITES: dict[str, Callable[[Sandbox, str], object]] = {
    "write_file": lambda s, p: s.write_file(p, "overwritten"),
    "append": lambda s, p: s.write_file(p, "overwritten", append=True),
    "update_file": lambda s, p: s.update_file(p, b"overwritten"),
    "str_replace": lambda s, p: s.str_replace(p, CANARY, "overwritten"),
    "make_dir": lambda s, p: s.make_dir(p),
    "remove": lambda s, p: s.remove(p),
    "move": lambda s, p: s.move(p, f"{WORK}/taken"),
}


def outcome(call: Callable[[Sandbox, str], object], sandbox: Sandbox, path: str) -> str:
    """Everything that is told of a call: its result, or its typed error with all facts."""
    try:
        return repr(call(sandbox, path))
    except SandfleetError as exc:
        return repr(exc.to_wire())


def code_of(call: Callable[[], object]) -> str:
    """The code of the typed error that a call ends with; empty when it does what it was asked."""
    try:
        call()
    except SandfleetError as exc:
        return exc.code
    return ""


# --- F1: paths that lead out ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["../../../../secret", "../../../../../../../../etc/shadow", "/mnt/user-data/../../etc/passwd",
     "..\\..\\etc\\passwd", "%2e%2e/%2e%2e/%2e%2e/%2e%2e/secret", "/mnt/user-data/../../secret", "//../secret",
     "{root}/secret", "/proc/1/root/{root}/secret", "/proc/self/cwd/../../../../secret", "file://{root}/secret"],
)  # fmt: skip
def test_F1_a_path_that_leads_out_gives_nothing_of_the_host(field: Ground, sandbox: Sandbox, path: str) -> None:
    path = path.format(root=field.root)
    inside = sandbox.run(["cat", path]).stdout
    for name, call in {**READS, **WRITES}.items():
        told = outcome(call, sandbox, path).replace(path, "PATH").replace(repr(path)[1:-1], "PATH")
        assert CANARY not in told, name
        assert str(field.root) not in told, f"{name} names a path of the host: {told}"
        if name == "download_file" and inside:
            assert told == repr(inside.encode()), "what it reads is the sandbox's own"


@pytest.mark.parametrize("path", ["a\0b", "\0", "", "x" * 5000, "/" + "y/" * 4000], ids=lambda path: ascii(path[:4]))
def test_F1_nul_empty_and_endless_paths_are_invalid(sandbox: Sandbox, path: str) -> None:
    for name, call in {**READS, **WRITES}.items():
        with pytest.raises(SandfleetError) as refused:
            call(sandbox, path)
        assert refused.value.code == "invalid_argument", name


# --- F2, F3: links that the enemy laid -----------------------------------------------------------

TARGETS = ["{root}/secret", "../../../../secret", "{root}", "/proc/1/root", "/proc/self/root/{root}", "/proc/self/fd",
           "/var/run/docker.sock", "../../../../threads/neighbour/user-data/workspace"]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_F2_a_planted_link_gives_nothing_of_the_host(
    field: Ground, sandbox: Sandbox, tmp_path: Path, target: str
) -> None:
    attack_by_link(field, sandbox, tmp_path, target)


@pytest.mark.parametrize("target", TARGETS[:2])
@by_exec
def test_F2_nor_where_every_operation_is_a_docker_exec(
    field: Ground, sandbox: Sandbox, tmp_path: Path, target: str
) -> None:
    attack_by_link(field, sandbox, tmp_path, target)


def attack_by_link(field: Ground, sandbox: Sandbox, tmp_path: Path, target: str) -> None:
    field.sandbox(NEIGHBOUR).write_file(f"{WORK}/secret", CANARY)
    sandbox.run(["ln", "-s", target.format(root=field.root), f"{OUTPUTS}/x"]).check()
    for path in (f"{OUTPUTS}/x", f"{OUTPUTS}/x/secret", f"{OUTPUTS}/x{field.root}/secret", OUTPUTS):
        for name, call in READS.items():
            assert CANARY not in outcome(call, sandbox, path), (name, path)
    for path in (f"{OUTPUTS}/x", f"{OUTPUTS}/x/secret", f"{OUTPUTS}/x{field.root}/secret"):
        for name in ("write_file", "append", "update_file", "str_replace", "make_dir"):
            outcome(WRITES[name], sandbox, path)
            field.assert_untouched()
    sandbox.run(f"rm -rf {OUTPUTS}/x").check()
    sandbox.run(["ln", "-s", target.format(root=field.root), f"{OUTPUTS}/x"]).check()
    got = sandbox.download(OUTPUTS, tmp_path / "got")
    assert got.skipped
    assert list((tmp_path / "got").iterdir()) == []
    assert [info.name for info in field.provider.list_outputs(THREAD)] in ([], ["x"])
    assert field.sandbox(NEIGHBOUR).read_file(f"{WORK}/secret") == CANARY


@everywhere
def test_F2_a_link_to_a_system_file_is_the_sandboxs_own(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.run(f"ln -s /etc/passwd {OUTPUTS}/x").check()
    own = sandbox.run("cat /etc/passwd").stdout
    assert own != Path("/etc/passwd").read_text()
    assert sandbox.read_file(f"{OUTPUTS}/x") == own
    sandbox.download(f"{OUTPUTS}/x", tmp_path / "x")
    assert (tmp_path / "x").read_text() == own


FLIP = """
import itertools, os, sys
work, root = "/mnt/user-data/workspace", sys.argv[1]
os.makedirs(work + "/dir", exist_ok=True)
for name in ("plain", "dir/secret"):
    open(f"{work}/{name}", "w").write("plain")
turns = {"flip": (root + "/secret", "../../../../secret", "plain"), "flipdir": (root, "../../../..", "dir")}
for turn in itertools.count():
    for name, targets in turns.items():
        os.symlink(targets[turn % 3], work + "/next")
        os.rename(work + "/next", f"{work}/{name}")
    if turn == 10:
        open(work + "/flipping", "w").close()
"""
TRIES, FLIP_S = 3000, 6.0


def test_F3_a_link_that_flips_while_it_is_read_gives_no_secret(field: Ground, sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.write_file(f"{WORK}/flip.py", FLIP)
    sandbox.run(f"setsid python3 flip.py {field.root} > /dev/null 2>&1 & until test -e flipping; do sleep 0.01; done")
    handle, until, tries = field.sandbox(THREAD), time.monotonic() + FLIP_S, 0
    seen = {"plain": 0, "refused": 0}

    def told(call: Callable[[], object]) -> str:
        try:
            text = repr(call())
        except SandfleetError as exc:
            text, seen["refused"] = repr(exc.to_wire()), seen["refused"] + 1
        seen["plain"] += "plain" in text
        assert CANARY not in text
        return text

    while tries < TRIES and time.monotonic() < until:
        for path in (f"{WORK}/flip", f"{WORK}/flipdir/secret"):
            for read in (handle.read_file, handle.download_file):
                told(lambda read=read, path=path: read(path))  # type: ignore[misc]
        assert "neighbour" not in told(lambda: handle.list_dir(f"{WORK}/flipdir"))
        told(lambda: handle.grep(f"{WORK}/flipdir", "canary"))
        told(lambda: handle.write_file(f"{WORK}/flip", "plain"))
        told(lambda: handle.write_file(f"{WORK}/flipdir/secret", "plain", append=True))
        tries += 8
    for number in range(5):
        local = tmp_path / str(number)
        told(lambda local=local: handle.download(WORK, local))  # type: ignore[misc]
        assert all(CANARY not in path.read_text() for path in local.rglob("*") if path.is_file())
    field.assert_untouched()
    assert seen["plain"] > 0, seen
    assert seen["refused"] > 0, seen
    sandbox.run("pkill -f flip.py || kill -9 -1")


# --- F4, F5: uploads into prepared places --------------------------------------------------------

#: A link means in a write what it means in the sandbox: the bytes land in a file of its own, or the kernel refuses.
LANDED_INSIDE = ("", "read_only", "permission_denied", "path_not_found", "not_directory", "already_exists")


@everywhere
@pytest.mark.parametrize("target", ["{root}/secret", "../../../../secret", "/etc/passwd"])
def test_F4_an_upload_goes_through_no_planted_link(
    field: Ground, sandbox: Sandbox, tmp_path: Path, target: str
) -> None:
    (tmp_path / "report.pdf").write_text("report")
    (tmp_path / "big.bin").write_bytes(b"b" * (5 * MIB))
    before = Path("/etc/passwd").read_bytes(), sandbox.run("cat /etc/passwd").stdout
    for name in ("report.pdf", "big.bin", "written"):
        sandbox.run(["ln", "-s", target.format(root=field.root), f"{UPLOADS}/{name}"]).check()
    for name in ("report.pdf", "big.bin"):
        assert code_of(partial(sandbox.upload, tmp_path / name, f"{UPLOADS}/{name}")) in LANDED_INSIDE
    assert code_of(partial(sandbox.update_file, f"{UPLOADS}/written", b"mine")) in LANDED_INSIDE
    assert code_of(partial(field.provider.upload_to_thread, THREAD, "report.pdf", b"mine")) in LANDED_INSIDE
    assert (Path("/etc/passwd").read_bytes(), sandbox.run("cat /etc/passwd").stdout) == before
    field.assert_untouched()


@everywhere
def test_F4_an_uploaded_tree_goes_through_no_planted_link(field: Ground, sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tree" / "d").mkdir(parents=True)
    (tmp_path / "tree" / "d" / "secret").write_text("overwritten")
    sandbox.run(f"mkdir {UPLOADS}/tree && ln -s {field.root} {UPLOADS}/tree/d").check()
    assert code_of(partial(sandbox.upload, tmp_path / "tree", f"{UPLOADS}/tree")) in LANDED_INSIDE
    field.assert_untouched()


@as_root
def test_F5_the_three_directories_cannot_be_replaced(field: Ground, sandbox: Sandbox) -> None:
    for attack in ("mv outputs o2", "rmdir uploads", "ln -s / x", "mkdir x", "chmod 777 .", "rm -rf outputs"):
        sandbox.run(f"cd /mnt/user-data && {attack}")
    top = field.user_data(THREAD)
    assert sorted(path.name for path in top.iterdir()) == ["outputs", "uploads", "workspace"]
    assert all(path.is_dir() and not path.is_symlink() for path in top.iterdir())
    assert stat.S_IMODE(top.stat().st_mode) == 0o755


def test_F5_an_upload_through_a_replaced_directory_stays_inside(
    field: Ground, sandbox: Sandbox, tmp_path: Path
) -> None:
    name = f"sandfleet-f5-{os.getpid()}"
    (tmp_path / name).write_text("planted")
    sandbox.run(f"mkdir {WORK}/out && mv {WORK}/out {WORK}/o2 && ln -s / {WORK}/out").check()
    for folder in ("etc", "usr/bin", str(field.root)[1:], "var/run"):
        path = f"{WORK}/out/{folder}/{name}"
        assert code_of(partial(sandbox.upload, tmp_path / name, path)) in LANDED_INSIDE, folder
        assert not os.path.lexists(f"/{folder}/{name}")


# --- F7: what is read-only -----------------------------------------------------------------------


@everywhere
def test_F7_skills_stay_as_they_are(field: Ground, sandbox: Sandbox) -> None:
    for attack in (
        "touch /mnt/skills/x", "echo x >> /mnt/skills/SKILL.md", "mount -o remount,rw /mnt/skills",
        "mount -o remount,bind,rw /mnt/skills", "umount /mnt/skills", "rm -rf /mnt/skills", "chmod 777 /mnt/skills",
        "ln -f /mnt/skills/SKILL.md SKILL.md && echo x >> SKILL.md", "touch /mnt/acp-workspace/x",
    ):  # fmt: skip
        done = sandbox.run(attack)
        assert done.exit_code != 0, attack
    for name, call in WRITES.items():
        for path in ("/mnt/skills/SKILL.md", "/mnt/skills/new"):
            with pytest.raises(SandfleetError) as refused:
                call(sandbox, path)
            expected = {"read_only", "permission_denied", "path_not_found", "no_match", "already_exists",
                        "not_directory"}  # fmt: skip
            assert refused.value.code in expected, name
    assert {path.name: path.read_text() for path in field.skills.iterdir()} == {"SKILL.md": "how to\n"}
    assert list((field.user_data(THREAD).parent / "acp-workspace").iterdir()) == []
    assert sandbox.read_file("/mnt/skills/SKILL.md") == "how to\n"


# --- F8, F9: what is no ordinary file ------------------------------------------------------------


def test_F8_fifos_devices_and_sockets_are_refused_and_block_nobody(sandbox: Sandbox, tmp_path: Path) -> None:
    make_socket = "python3 -c \"import socket; socket.socket(1).bind('socket')\""
    sandbox.run(f"cd {OUTPUTS} && mkfifo fifo && ln -s /dev/zero zero && ln -s /dev/random random && ln -s fifo link "
                f"&& {make_socket} && echo here > plain").check()  # fmt: skip
    for node in ("c 1 5", "b 8 0"):
        assert sandbox.run(f"mknod {OUTPUTS}/node {node}").exit_code != 0
    for name in ("fifo", "zero", "random", "link", "socket"):
        path = f"{OUTPUTS}/{name}"
        for call in ("read_file", "read_text", "download_file"):
            with pytest.raises(SandfleetError) as refused:
                READS[call](sandbox, path)
            assert refused.value.code in ("not_regular_file", "permission_denied"), (name, call)
        for call in ("append", "str_replace"):
            with pytest.raises(SandfleetError) as refused:
                WRITES[call](sandbox, path)
            assert refused.value.code in ("not_regular_file", "permission_denied"), (name, call)
        with pytest.raises(SandfleetError):
            sandbox.download(path, tmp_path / name)
        assert not os.path.lexists(tmp_path / name)
    assert [match.line for match in sandbox.grep(OUTPUTS, ".")[0]] == ["here"]
    got = sandbox.download(OUTPUTS, tmp_path / "tree")
    regular = [path.name for path in (tmp_path / "tree").iterdir() if path.is_file() and not path.is_symlink()]
    assert regular == ["plain"]
    assert len(got.skipped) >= 4, got.skipped


@everywhere
def test_F9_a_file_of_a_terabyte_costs_nobody_memory(field: Ground, sandbox: Sandbox, tmp_path: Path) -> None:
    (node,) = field.stack.nodes.values()
    sandbox.run(f"truncate -s 1T {OUTPUTS}/big").check()
    for name in ("read_file", "read_text", "download_file"):
        with pytest.raises(SandfleetError) as refused:
            READS[name](sandbox, f"{OUTPUTS}/big")
        assert refused.value.code in ("file_too_large", "binary_file", "search_timeout"), name
    with pytest.raises(SandfleetError):
        sandbox.str_replace(f"{OUTPUTS}/big", "a", "b")
    assert sandbox.grep(OUTPUTS, "x") == ([], False)
    used = []
    for most in (8 * MIB, 64 * MIB):
        with pytest.raises(Enough):
            sandbox.download(f"{OUTPUTS}/big", tmp_path / "big", on_progress=partial(stop, most))
        assert list(tmp_path.iterdir()) == [], "whoever stops it is left with nothing of it"
        used.append(psutil.Process(node.pid).memory_info().rss)
    assert used[1] - used[0] < 40 * MIB


class Enough(Exception):
    """The client wants no more."""


def stop(most: int, moved: int, _total: int | None) -> None:
    if moved > most:
        raise Enough


# --- F12, F13: names -----------------------------------------------------------------------------

HOSTILE_TREE = r"""
import os, socket
top = os.fsencode("/mnt/user-data/outputs/tree")
os.makedirs(top)
os.chdir(top)
names = [b"new\nline", b"-rf", b"--help", "\u202etxt.exe".encode(), b"\xff\xfe", b" ", b"...", b"a\\..\\..\\b", b"~",
         b"$(touch pwned)", b"`id`", b"a\tb", b"\x1b[2J", "e\u0301".encode(), "\u00e9".encode(), b"X", b"x",
         b"n" * 255, b"con", b"|id", b"*", b".sandfleet", b".part"]
for name in names:
    with open(name, "wb") as file:
        file.write(b"content of " + name)
os.chmod(b"X", 0o6777)
links = {b"out": b"../../../../../secret", b"abs": b"/etc/passwd", b"up": b"..", b"self": b"self", b"in": b"X",
         b"via": b"d/../../..", b"d/out": b"../../evil", b"l1": b"d", b"l2": b"l1/..", b"l3": b"l2/l2/../../.."}
os.mkdir(b"d")
open(b"d/f", "w").close()
for name, target in links.items():
    os.symlink(target, name)
os.link(b"X", b"hard")
os.mkfifo(b"fifo")
os.mkdir(b"deep")
os.chdir(b"deep")
for level in range(DEPTH):
    os.mkdir(b"d")
    os.chdir(b"d")
open(b"bottom", "w").close()
# The chain of CVE-2025-4517: names that are short where they are read and longer than the longest path when followed.
os.chdir(top)
long, steps = b"d" * 247, "abcdefghijklmnop"
path = b"chain"
os.mkdir(path)
for step in steps[:CHAIN]:
    os.mkdir(path + b"/" + long)
    os.symlink(long, path + b"/" + step.encode())
    path += b"/" + long
os.symlink(b"../" * CHAIN + b"../evil", path + b"/escape")
"""


def fill(sandbox: Sandbox, depth: int, chain: int) -> None:
    program = HOSTILE_TREE.replace("DEPTH", str(depth)).replace("CHAIN", str(chain))
    sandbox.run(["python3", "-c", program]).check()


def test_F12_a_hostile_tree_creates_nothing_outside(field: Ground, sandbox: Sandbox, tmp_path: Path) -> None:
    fill(sandbox, depth=200, chain=8)
    out = tmp_path / "a" / "b" / "c" / "got"
    got = sandbox.download(f"{OUTPUTS}/tree", out)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "got" not in path.parts] == [
        "a", "a/b", "a/b/c",
    ]  # fmt: skip
    real = os.path.realpath(out)
    for folder, folders, files in os.walk(os.fsencode(out)):
        for name in folders + files:
            path = os.path.join(folder, name)
            followed = os.fsdecode(os.path.realpath(path))
            assert followed == real or followed.startswith(real + "/"), path
            if name in files and not os.path.islink(path):
                assert os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID) == 0
    for name in (b"new\nline", b"-rf", "\u202etxt.exe".encode(), b"\xff\xfe", b"$(touch pwned)", b"n" * 255):
        path = os.path.join(os.fsencode(out), name)
        with open(path, "rb") as file:
            assert file.read() == b"content of " + name
    assert os.path.islink(out / "in")
    for name in ("out", "abs", "up", "via", "fifo", "l2", "l3"):
        assert not os.path.lexists(out / name), name
    assert len(got.skipped) >= 8


def test_F12_a_tree_deeper_than_the_longest_path_ends_with_an_answer(sandbox: Sandbox, tmp_path: Path) -> None:
    fill(sandbox, depth=2500, chain=16)
    out = tmp_path / "got"
    with pytest.raises(OSError, match="too long"):
        sandbox.download(f"{OUTPUTS}/tree", out)
    assert [path.name for path in tmp_path.iterdir()] == ["got"]
    remove_tree(out)  # pytest's own way of removing it ends at a thousand levels
    assert code_of(lambda: sandbox.remove(f"{OUTPUTS}/tree", recursive=True)) == "invalid_argument"
    sandbox.run(f"rm -rf {OUTPUTS}/tree").check()


NAMES = ["'; import os; os.system('touch pwned'); '", "$(touch pwned)", "`touch pwned`", "-rf", "--include=*",
         "a;touch pwned", "a\ntouch pwned", "|touch pwned", '"; touch pwned; "', "{{7*7}}", "%s%n", "* ?[a]",
         "&& touch pwned"]  # fmt: skip


@everywhere
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_F13_a_name_is_a_name_and_nothing_else(sandbox: Sandbox, name: str) -> None:
    folder = f"{WORK}/{name}"
    path = f"{folder}/{name}"
    sandbox.write_file(path, f"before {name}\n")
    assert sandbox.read_file(path) == f"before {name}\n"
    assert [info.name for info in sandbox.list_files(folder)] == [name]
    assert sandbox.glob(folder, "**/*") == ([path], False)
    (match,) = sandbox.grep(folder, name, literal=True)[0] if "\n" not in name else sandbox.grep(folder, "before")[0]
    assert match.path == path
    assert sandbox.str_replace(path, "before", "after") == 1
    assert sandbox.run(["cat", "--", name], cwd=folder).stdout == f"after {name}\n"
    assert sandbox.run("pwd", cwd=folder, env={"X": name}).stdout == f"{folder}\n"
    sandbox.move(path, f"{path}2")
    sandbox.remove(folder, recursive=True)
    assert sandbox.run("find / -name 'pwned*' 2>/dev/null").stdout == ""
    assert sandbox.list_files(WORK) == []


# --- F14: patterns that explode ------------------------------------------------------------------


def test_F14_patterns_that_explode_end_at_their_time(field: Ground, sandbox: Sandbox) -> None:
    sandbox.write_file(f"{WORK}/bomb/text", "a" * 1900 + "\n")
    sandbox.write_file(f"{WORK}/bomb/" + "a" * 200, "")
    calls = [Call("grep", {"path": f"{WORK}/bomb", "pattern": pattern, "timeout_s": 1.0})
             for pattern in ("(a+)+$b", "(a|aa)+$b", "(.*a){25}b")]  # fmt: skip
    calls.append(Call("glob", {"path": f"{WORK}/bomb", "pattern": "*a" * 60 + "b", "timeout_s": 1.0}))
    ended: list[str] = []

    def attack(call: Call) -> None:
        try:
            sandbox._call(call)
            ended.append("done")
        except SandfleetError as exc:
            ended.append(exc.code)

    threads = [threading.Thread(target=attack, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    assert field.sandbox(NEIGHBOUR).run("echo served").stdout == "served\n"
    for thread in threads:
        thread.join(30)
    assert set(ended) <= {"search_timeout", "done"}
    assert len(ended) == len(calls)
    assert "search_timeout" in ended
    assert sandbox.read_file(f"{WORK}/bomb/text", 1, 1)


def test_F14_a_glob_of_stars_over_many_files_is_capped(sandbox: Sandbox) -> None:
    sandbox.run(
        "for d in 1 2 3 4 5 6 7 8; do mkdir -p w/$d/$d/$d && (cd w/$d/$d/$d && seq 600 | xargs touch); done"
    ).check()
    paths, truncated = sandbox.glob(f"{WORK}/w", "**/**/**/**/*")
    assert (len(paths), truncated) == (200, True)


# --- F15: two callers ----------------------------------------------------------------------------

READER = """
import sys
torn = 0
while True:
    try:
        open("stop"); break
    except FileNotFoundError:
        pass
    data = open("shared").read()
    torn += len(data) != int(sys.argv[1]) or not data.endswith("end\\n")
print("torn", torn)
"""
EDITS = 40


def test_F15_two_callers_replace_in_one_file_and_nothing_is_lost_or_torn(field: Ground, sandbox: Sandbox) -> None:
    lines = [f"{who}-{number:03}-old" for number in range(EDITS) for who in ("first", "other")]
    sandbox.write_file(f"{WORK}/shared", content := "\n".join([*lines, "x" * 100_000, "end\n"]))
    sandbox.write_file(f"{WORK}/reader.py", READER)
    torn: list[str] = []
    counts: list[int] = []

    def edit(handle: Sandbox, who: str) -> None:
        for number in range(EDITS):
            counts.append(handle.str_replace(f"{WORK}/shared", f"{who}-{number:03}-old", f"{who}-{number:03}-new"))

    reader = threading.Thread(
        target=lambda: torn.append(sandbox.run(f"python3 reader.py {len(content)}", timeout_s=50).stdout)
    )
    with SandboxProvider(field.stack.settings) as other_client:
        other = other_client.get(other_client.acquire(THREAD))
        assert other is not None
        editors = [threading.Thread(target=edit, args=pair) for pair in ((sandbox, "first"), (other, "other"))]
        reader.start()
        for editor in editors:
            editor.start()
        for editor in editors:
            editor.join()
        sandbox.write_file(f"{WORK}/stop", "")
        reader.join()
        assert counts == [1] * 2 * EDITS
        assert torn == ["torn 0\n"]
        assert sandbox.read_file(f"{WORK}/shared") == content.replace("-old", "-new")
        # And of one and the same edit one wins.
        for number in range(10):
            sandbox.write_file(f"{WORK}/once", "free")
            results: list[Any] = []
            pair = [threading.Thread(target=claim, args=(handle, name, results))
                    for handle, name in ((sandbox, "first"), (other, "other"))]  # fmt: skip
            for thread in pair:
                thread.start()
            for thread in pair:
                thread.join()
            winners = [result for result in results if isinstance(result, str)]
            assert len(winners) == 1, (number, results)
            assert sandbox.read_file(f"{WORK}/once") == winners[0]


def claim(handle: Sandbox, name: str, results: list[Any]) -> None:
    try:
        handle.str_replace(f"{WORK}/once", "free", name)
        results.append(name)
    except NoMatch as exc:
        results.append(exc)


def test_F15_no_temporary_file_of_an_edit_is_left(sandbox: Sandbox) -> None:
    sandbox.write_file(f"{WORK}/f", "a")
    for _ in range(5):
        sandbox.str_replace(f"{WORK}/f", "a", "a")
    wait_until(lambda: sandbox.run("ls -A").stdout == "f\n", 5)
