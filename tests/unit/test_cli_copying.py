"""Where a copy goes: what the two ends mean, and the rules of cp."""

from __future__ import annotations

import click
import pytest

from sandfleet.cli import main
from sandfleet.cli.copying import Place, _naming_both, place_of, target_path
from sandfleet.errors import InvalidArgument, NotDirectory, PathNotFound, SandfleetError

WORKSPACE = "/mnt/user-data/workspace"


@pytest.mark.parametrize(
    ("text", "thread", "path"),
    [
        ("alice:/tmp/a", "alice", "/tmp/a"),
        ("alice:a/b", "alice", f"{WORKSPACE}/a/b"),
        ("alice:", "alice", WORKSPACE),
        ("alice:../outputs/", "alice", f"{WORKSPACE}/../outputs/"),
        ("t-1_X:a:b", "t-1_X", f"{WORKSPACE}/a:b"),
        ("./alice:a", None, "./alice:a"),
        ("/tmp/alice:a", None, "/tmp/alice:a"),
        ("ä:a", None, "ä:a"),
        ("x" * 65 + ":a", None, "x" * 65 + ":a"),
        ("a.txt", None, "a.txt"),
        ("-", None, "-"),
    ],
)
def test_an_end_is_a_thread_and_a_path_or_a_local_path(text: str, thread: str | None, path: str) -> None:
    assert place_of(text) == Place(text, path, thread)


def test_an_empty_end_is_refused() -> None:
    with pytest.raises(click.BadParameter):
        place_of("")


@pytest.mark.parametrize(
    ("target", "source", "source_is_dir", "found", "path"),
    [
        ("/d", "a.txt", False, None, "/d"),
        ("/d", "a.txt", False, "file", "/d"),
        ("/d", "x/a.txt", False, "dir", "/d/a.txt"),
        ("/d/", "a.txt", False, "dir", "/d/a.txt"),
        ("/d", "src", True, None, "/d"),
        ("/d/", "src/", True, None, "/d"),
        ("/d", "src/", True, "dir", "/d/src"),
        ("/d", "src/.", True, "dir", "/d"),
        ("/d", "src/./", True, "dir", "/d"),
        ("/d", ".", True, "dir", "/d"),
        ("/d", "..", True, "dir", "/d"),
        ("/d", "/", True, "dir", "/d"),
        ("/", "src", True, "dir", "/src"),
    ],
)
def test_the_copy_gets_the_path_that_cp_would_give_it(
    target: str, source: str, source_is_dir: bool, found: str | None, path: str
) -> None:
    assert target_path(target, source, source_is_dir=source_is_dir, found=found) == path


def test_a_directory_goes_over_no_file_and_a_file_into_no_missing_directory() -> None:
    with pytest.raises(NotDirectory):
        target_path("/d", "src", source_is_dir=True, found="file")
    with pytest.raises(NotDirectory):
        target_path("/d/", "a", source_is_dir=False, found="file")
    with pytest.raises(PathNotFound):
        target_path("/d/", "a", source_is_dir=False, found=None)


@pytest.mark.parametrize(
    ("error", "both"),
    [
        (PathNotFound("No such file", path="/x"), True),
        (InvalidArgument("Too many levels of symbolic links", path="/x", errno="ELOOP"), True),
        (InvalidArgument("user_id must be 1-64 characters"), False),
    ],
)
def test_a_failure_about_a_path_names_both_ends(error: SandfleetError, both: bool) -> None:
    with pytest.raises(type(error)) as told, _naming_both(place_of("t:x"), place_of("y")):
        raise error
    assert told.value.message.startswith("cannot copy t:x to y: ") is both


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a", "b"], "THREAD:PATH"),
        (["x:a", "y:b"], "sandfleet cp A:FILE -"),
        (["--json", "x:a", "-"], "standard output"),
        (["", "x:a"], "empty"),
        (["x:a"], "DST"),
    ],
)
def test_a_copy_without_one_end_in_a_sandbox_is_a_wrong_call(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cp", *words]) == 2
    out, err = capsys.readouterr()
    assert told in out + err
