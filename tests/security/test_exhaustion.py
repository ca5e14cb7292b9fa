"""Using up what others need: the cases R of the catalogue. SECURITY.md says what each is about."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from sandfleet.errors import ResourceLimitExceeded
from tests.security.boxes import Box, Boxes, MemoryWatch, as_root, median_s, on
from tests.services import wait_until

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
#: How much slower a neighbour may get before it counts as not served, and the least that it is compared with:
#: machines that run tests have few cores and much else to do.
SLOWER, CALM_S = 100, 0.005


def assert_served(neighbour: Box, calm_s: float) -> None:
    """A neighbour's commands take about as long as they did in calm times."""
    busy_s = median_s(lambda: neighbour.run("true"))
    assert busy_s < SLOWER * max(calm_s, CALM_S), f"{busy_s} s instead of {calm_s} s"


def calm_s(neighbour: Box) -> float:
    """How long a neighbour's command takes when nobody attacks."""
    return median_s(lambda: neighbour.run("true"))


def limit_of_pids(box: Box) -> int:
    """Processes and threads the box may have."""
    settings = box.boxes.backend.settings
    own = settings.container.pids if box.boxes.backend.name == "docker" else settings.max_nproc
    return int(box.plan.spec.options.get("pids", own))


# --- processes -----------------------------------------------------------------------------------


@as_root
def test_R1_a_fork_bomb_stops_at_the_limit_and_the_neighbour_is_served(boxes: Boxes, neighbour: Box) -> None:
    calm = calm_s(neighbour)
    with boxes.one() as box:
        bomb = box.begin(":(){ :|:& };:; for i in $(seq 9999); do sleep 9 & done; wait", timeout_s=3.0)
        wait_until(lambda: len(box.host_pids()) > limit_of_pids(box) // 2, 20)
        assert_served(neighbour, calm)
        assert len(box.host_pids()) <= limit_of_pids(box)
        ended = bomb()
        assert ended["timed_out"] or "Resource temporarily unavailable" in ended["stderr"]
        assert box.boxes.world.deaths == []
        wait_until(lambda: box.do("execute_command", command="true").error is None, 20)


@as_root
def test_R1_one_that_escapes_its_group_gets_a_typed_answer_and_ends_with_the_sandbox(
    boxes: Boxes, neighbour: Box
) -> None:
    calm = calm_s(neighbour)
    shares_cpu = boxes.backend.name == "local"  # processes are limited there, CPU is not: who has more gets more
    fewer = {} if shares_cpu else {"options": {"pids": 64}}
    with boxes.one(**fewer) as box:
        escaping = "import os\nwhile True:\n try:\n  os.fork()\n  os.setsid()\n except OSError: pass"
        box.result(argv=["python3", "-c", escaping], timeout_s=2.0)
        wait_until(lambda: len(box.host_pids()) > limit_of_pids(box) * 3 // 4, 20)
        # One of them may die and leave room for a moment.
        refused = wait_until(lambda: box.do("execute_command", command="true", timeout_s=5.0).error, 20)
        assert isinstance(refused, ResourceLimitExceeded)
        assert refused.facts["resource"] == "pids"
        assert box.value("health")["status"] == "alive", "its files can still be had"
        box.value("write_file", b"saved", path="saved")
        assert box.read("saved") == b"saved"
        assert neighbour.run("echo served") == "served\n"
        if not shares_cpu:
            assert_served(neighbour, calm)
        inside = box.host_pids()
    assert not [pid for pid in inside if Path(f"/proc/{pid}").exists()]


def test_R6_open_files_and_sockets_have_a_limit_that_cannot_be_raised(box: Box) -> None:
    for attempt in ("ulimit -n 1000000", "ulimit -Hn 5000", "ulimit -c 1"):
        assert "done" not in box.run(f"{attempt} 2>/dev/null && echo done"), attempt
    opening = "import sys\nheld = []\ntry:\n while len(held) < 10**6: held.append({})\nexcept OSError as exc: print({})"
    said = "exc.errno, len(held)"
    for one in ("open('/dev/null')", "__import__('socket').socket()"):
        errno, held = box.python(opening.format(one, said)).split()
        assert (errno, int(held) <= 4096) == ("24", True), one
    assert box.run("ulimit -n; ulimit -Hn; ulimit -c").split() == ["4096", "4096", "0"]


@as_root
def test_R6_threads_have_a_limit(boxes: Boxes, neighbour: Box) -> None:
    threads = """
import threading
over, held = threading.Event(), 0
try:
    while held < 10**5:
        threading.Thread(target=over.wait, daemon=True).start()
        held += 1
except RuntimeError as exc:
    print(held, exc)
over.set()
"""
    with boxes.one() as box:
        held, _, words = box.python(threads).partition(" ")
        assert int(held) <= limit_of_pids(box)
        assert "can't start new thread" in words
        assert box.run("echo alive") == "alive\n"


# --- memory --------------------------------------------------------------------------------------

HOG = "held = []\nwhile True: held.append(bytearray(8 * 1024 * 1024))"


@on("docker")
def test_R2_who_takes_all_memory_is_killed_alone(boxes: Boxes, neighbour: Box) -> None:
    with boxes.one(options={"memory_bytes": 128 * MIB}) as box, MemoryWatch() as watch:
        bystander = box.begin("sleep 60", timeout_s=4.0)
        value = box.result(argv=["python3", "-c", HOG], timeout_s=15.0)
        assert (value["exit_code"], value["signal"], value["timed_out"]) == (None, "SIGKILL", False)
        assert value["out_of_memory"] is True
        # Told of the one that was killed by a shell, too, and of nobody who was killed otherwise.
        assert box.result("exec kill -9 $$")["out_of_memory"] is False
        box.value("write_file", HOG.encode(), path="hog.py")
        assert box.result("python3 hog.py; exit $?", timeout_s=15.0)["out_of_memory"] is True
        assert bystander()["timed_out"], "it lived until its own deadline"
        assert box.run("echo alive") == "alive\n"
        assert box.boxes.world.deaths == []
        assert neighbour.run("echo alive") == "alive\n"
    assert watch.grown_bytes < 50 * MIB


@on("docker")
def test_R2_memory_without_a_process_counts_too(boxes: Boxes, neighbour: Box) -> None:
    """Files in memory and in the page cache: the second makes way, the first is bounded and part of the limit."""
    with boxes.one(options={"memory_bytes": 128 * MIB}) as box:
        box.do("execute_command", command="head -c 200M /dev/zero > /tmp/fill", timeout_s=15.0)
        box.do("execute_command", command="head -c 200M /dev/zero > big; cat big > /dev/null; rm big", timeout_s=15.0)
        wait_until(lambda: boxes.world.deaths or box.run("rm -f /tmp/fill; echo alive") == "alive\n", 20)
        assert boxes.world.deaths in ([], [(box.id, "out of memory")]), "what memory is full of belongs to no process"
        boxes.world.deaths.clear()
        assert neighbour.run("echo alive") == "alive\n"


@on("docker", "local")
def test_R2_memory_file_systems_are_bounded(box: Box) -> None:
    sizes = {"/tmp": 256 * MIB, "/dev/shm": 64 * MIB, "/run": 64 * MIB}
    for place, size in sizes.items():
        filled = box.run(f"head -c {size + MIB} /dev/zero > {place}/fill; stat -c %s {place}/fill; rm -f {place}/fill")
        if "Permission denied" in filled:
            continue  # not even that
        assert "No space left on device" in filled, place
        assert int(filled.split()[0]) <= size, place
    written = "while read -r _ place kind options _; do [ $kind = tmpfs ] && [ -w $place ] && echo $options; done"
    seen = box.run(f"{written} < /proc/mounts").splitlines()
    assert len(seen) >= 2
    assert not [options for options in seen if "size=" not in options], seen


# --- output --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "command"),
    [
        ("lines without end", "yes"),
        ("noise without end", "cat /dev/urandom"),
        ("noise on both streams", "cat /dev/urandom >&2 & cat /dev/urandom"),
        ("one line of 1 GB", "head -c 1000000000 /dev/zero | tr '\\0' a"),
        ("what becomes larger by encoding", "head -c 50000000 /dev/zero"),
    ],
)
def test_R3_a_flood_of_output_is_cut_where_it_arises(box: Box, what: str, command: str) -> None:
    box.run("true")
    with MemoryWatch() as watch:
        value = box.result(command, timeout_s=1.5)
    assert value["truncated"], what
    assert len(value["stdout"]) + len(value["stderr"]) < 2 * (MIB + 4096)
    assert watch.grown_bytes < 50 * MIB
    assert box.run("echo alive") == "alive\n"


def test_R3_so_it_is_in_a_session_and_in_the_background(box: Box) -> None:
    with MemoryWatch() as watch:
        value = box.result("yes | head -c 200000000", session="flood", timeout_s=10.0)
        box.result("nohup setsid yes > /dev/null 2>&1 & (yes & sleep 0.2); echo over", timeout_s=5.0)
    assert value["truncated"]
    assert len(value["stdout"]) < MIB + 4096
    assert watch.grown_bytes < 50 * MIB
    box.run("pkill yes || killall yes || kill -9 -1")
    box.do("close_session", session="flood")


# --- CPU -----------------------------------------------------------------------------------------


@on("docker")
def test_R7_who_burns_cpu_gets_his_share_and_the_neighbour_is_served(box: Box, neighbour: Box) -> None:
    calm = calm_s(neighbour)
    before = box.value("metrics")["cpu_s"]
    begun = time.perf_counter()
    burning = box.begin("for i in $(seq 16); do while :; do :; done & done; wait", timeout_s=3.0)
    assert_served(neighbour, calm)
    assert box.run("echo served") == "served\n", "even the sandbox itself"
    assert burning()["timed_out"]
    used = box.value("metrics")["cpu_s"] - before
    assert used < 1.5 * (time.perf_counter() - begun), "one core, and what the kernel rounds"
    # That alone would hold on a machine with one idle core: the limit itself, in either version of control groups.
    told = box.run("cd /sys/fs/cgroup && (cat cpu.max || cat cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us) 2>/dev/null")
    quota, period = told.split()
    assert int(quota) == int(period)


# --- time ----------------------------------------------------------------------------------------

DAEMONS = """
nohup sleep 1001 > /dev/null 2>&1 &
setsid sleep 1002 > /dev/null 2>&1 &
(setsid sh -c 'trap "" HUP TERM INT; sleep 1003; sleep 1003' > /dev/null 2>&1 &)
python3 -c 'import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 99)
        time.sleep(1004)
'
"""


def sleepers(box: Box) -> set[str]:
    """What sleeps in the box, by its argument."""
    seen = box.run("for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done 2>/dev/null")
    return {word for word in seen.split() if word.isdecimal() and word.startswith("10")}


def test_R8_the_deadline_ends_the_whole_group(box: Box) -> None:
    tree = "trap '' TERM INT HUP; sleep 1005 & (sleep 1006 & sleep 1006) & sh -c 'trap \"\" TERM; sleep 1007'; wait"
    value = box.result(tree, timeout_s=0.7)
    assert value["timed_out"]
    wait_until(lambda: not sleepers(box) & {"1005", "1006", "1007"}, 10, lambda: sleepers(box))


@as_root
def test_R8_daemons_outlive_their_command_and_not_their_sandbox(boxes: Boxes) -> None:
    with boxes.one() as box:
        value = box.result(DAEMONS, timeout_s=10.0)
        assert not value["timed_out"], "nobody waits for a daemon"
        wait_until(lambda: len(box.host_pids()) >= 5, 10)
        inside = box.host_pids()
    left = [pid for pid in inside if Path(f"/proc/{pid}").exists()]
    assert not left, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]


# --- the host's disk -----------------------------------------------------------------------------


@on("docker")
def test_R9_the_engine_keeps_no_log_of_what_a_sandbox_writes(box: Box) -> None:
    told = subprocess.run(["docker", "inspect", "--format", "{{.LogPath}}|{{.HostConfig.LogConfig.Type}}",
                           box.container], check=True, capture_output=True, text=True).stdout.strip()  # fmt: skip
    assert told == "|none"
    box.result("yes | head -c 50000000; yes | head -c 50000000 >&2", timeout_s=20.0)
    for stream in ("/proc/1/fd/1", "/proc/1/fd/2", "/dev/console", "/dev/log", "/dev/kmsg"):
        assert "done" not in box.run(f"(yes | head -c 1000000 > {stream}) 2>/dev/null && echo done"), stream
    logs = subprocess.run(["docker", "logs", box.container], capture_output=True, text=True, check=False)
    assert logs.returncode != 0, "there is nothing to read"
    kept = _kept_for(box.container)
    assert kept is None or kept < MIB


def _kept_for(container: str) -> int | None:
    """Bytes in the engine's own directory of a container; None where this process cannot look."""
    root = subprocess.run(["docker", "info", "--format", "{{.DockerRootDir}}"], check=True, capture_output=True,
                          text=True).stdout.strip()  # fmt: skip
    directory = Path(root) / "containers" / container
    if not os.access(directory, os.R_OK | os.X_OK):
        return None
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file() and "mounts" not in path.parts)
