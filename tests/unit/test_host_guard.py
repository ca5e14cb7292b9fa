"""What host mode refuses before anything starts; which shell and which environment commands get."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet.errors import PathNotFound, PermissionDenied, ReadOnly
from sandfleet_workers.backends.host_guard import check_argv, check_command, check_cwd, check_path
from sandfleet_workers.backends.host_paths import Mapping, PathMap
from sandfleet_workers.backends.host_shell import choose_shell, inherited_environment
from sandfleet_workers.backends.host_words import words_of

PATHS = PathMap(
    [
        Mapping("/mnt/user-data", "/h/user-data"),
        Mapping("/workspace", "/h/user-data/workspace", alias=True),
        Mapping("/mnt/skills", "/h/skills", read_only=True, label="skills path"),
        Mapping("/mnt/acp-workspace", "/h/acp", read_only=True, label="ACP workspace"),
        Mapping("/mnt/reference", "/h/reference", read_only=True, label="read-only mount"),
        Mapping("/mnt/project", "/h/project"),
        Mapping("/tmp", "/h/tmp"),
    ]
)
ROOTS = "/mnt/acp-workspace, /mnt/project, /mnt/reference, /mnt/skills, /mnt/user-data, /tmp"


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["f", "a/b", "/mnt/user-data", "/mnt/user-data/x", "/workspace/x", "/mnt/project/x", "/tmp/x", "..a", "a../b"],
)
def test_paths_of_the_sandbox_may_be_read_and_written(path: str) -> None:
    check_path(PATHS, path, write=False)
    check_path(PATHS, path, write=True)


@pytest.mark.parametrize(
    "path", ["..", "../x", "/mnt/user-data/../../etc/passwd", "a\\..\\b", "a/..", "/etc/../mnt/user-data"]
)
@pytest.mark.parametrize("write", [False, True])
def test_dots_that_climb_are_refused_first(path: str, *, write: bool) -> None:
    with pytest.raises(PermissionDenied, match=r"^Access denied: path traversal detected$"):
        check_path(PATHS, path, write=write)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/", "/mnt", "/mnt/user-database/x", "/proc/self/environ", "/workspaces"]
)
def test_other_paths_are_refused_with_the_ones_that_are_allowed(path: str) -> None:
    with pytest.raises(
        PermissionDenied, match=r"Only paths under /mnt/acp-workspace/, .*/mnt/user-data/, /tmp/ are allowed"
    ):
        check_path(PATHS, path, write=False)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/mnt/skills/a", "Write access to skills path is not allowed: /mnt/skills/a"),
        ("/mnt/acp-workspace/a", "Write access to ACP workspace is not allowed: /mnt/acp-workspace/a"),
        ("/mnt/reference/a", "Write access to read-only mount is not allowed: /mnt/reference/a"),
    ],
)
def test_writing_where_files_are_only_read_is_refused(path: str, words: str) -> None:
    check_path(PATHS, path, write=False)
    with pytest.raises(ReadOnly) as refused:
        check_path(PATHS, path, write=True)
    assert str(refused.value) == words
    assert refused.value.errno == 30


def test_commands_start_only_where_the_sandbox_has_a_directory() -> None:
    check_cwd(PATHS, "sub")
    check_cwd(PATHS, "/mnt/skills")
    with pytest.raises(PathNotFound, match="/mnt/user-data/"):
        check_cwd(PATHS, "/nowhere")
    with pytest.raises(PermissionDenied):
        check_cwd(PATHS, "../..")


# --- commands --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "ls",
        "cat /mnt/user-data/workspace/f > /tmp/out 2>/dev/null",
        "/usr/bin/env python3 /workspace/x.py",
        "curl -s https://example.com/etc/passwd?x=/../y -o /tmp/y",
        "pip install git+https://host/a/../b",
        "cd /mnt/user-data/outputs && ls; (cd sub && ls); pushd /tmp",
        "ls /mnt/project/src /mnt/reference",
        "sed 's/a/b/' f; sed -e '/etc/d' f; awk '/usr/ {print}' f; grep -r '/api/v1' .",
        "echo 10 / 2; expr 4 / 2; echo a // comment",
        "git diff main..dev; echo {1..5} ...",
        "cat > f <<'EOF'\n/etc/passwd and ../x\nEOF\nls",
        "cat <<-EOF\n\tcd /\n\tEOF",
        "echo hi # see /etc/passwd and cd /",
        "python3 -c 'print(f\"/{name}/x\")'",
        "echo /用户/x",
        "PATH=/mnt/user-data/bin:$PATH tool",
        "",
        "'unclosed",
        "echo $((1+2)) ${X:-y} `date`",
    ],
)
def test_ordinary_commands_pass(command: str) -> None:
    check_command(PATHS, command)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("cat /etc/passwd", "Unsafe absolute paths in command: /etc/passwd"),
        ("cat /root/x /etc/y", "Unsafe absolute paths in command: /etc/y, /root/x"),
        ("cat '/etc/passwd'", "Unsafe absolute paths in command: /etc/passwd"),
        ("cat /et\\c/passwd", "Unsafe absolute paths in command: /etc/passwd"),
        ("cat </etc/passwd", "Unsafe absolute paths in command: /etc/passwd"),
        ("echo x >/home/x", "Unsafe absolute paths in command: /home/x"),
        ("X=/etc/x:/tmp cmd", "Unsafe absolute paths in command: /etc/x"),
        ("tar --file=/var/x", "Unsafe absolute paths in command: /var/x"),
        ("cc -I/opt/x", "Unsafe absolute paths in command: /opt/x"),
        ("echo $(cat /etc/passwd)", "Unsafe absolute paths in command: /etc/passwd"),
        ('echo "$(cat /etc/passwd)"', "Unsafe absolute paths in command: /etc/passwd"),
        ("echo `cat /etc/passwd`", "Unsafe absolute paths in command: /etc/passwd"),
        ("diff <(cat /etc/passwd) f", "Unsafe absolute paths in command: /etc/passwd"),
        ("cat <<< /etc/passwd", "Unsafe absolute paths in command: /etc/passwd"),
        ("cat <<E\nx\nE\ncat /etc/passwd", "Unsafe absolute paths in command: /etc/passwd"),
        ("python3 -c 'open(\"/etc/passwd\")'", "Unsafe absolute paths in command: /etc/passwd"),
        ("cat //etc/passwd", "Unsafe absolute paths in command: /etc/passwd"),
        ("cat /{etc,usr}/passwd", "Unsafe absolute paths in command: /{etc"),
        ("cat /${X}/passwd", "Unsafe absolute paths in command: /${X}/passwd"),
        ("cat /mnt/user-database/x", "Unsafe absolute paths in command: /mnt/user-database/x"),
        ("cat /proc/self/environ", "Unsafe absolute paths in command: /proc/self/environ"),
        ("find / -name x", "Unsafe absolute paths in command: /"),
        ("ls /", "Unsafe absolute paths in command: /"),
        ("cat ../x", "Unsafe path traversal in command: ../x"),
        ("cat a/../../x", "Unsafe path traversal in command: a/../../x"),
        ("ls ..", "Unsafe path traversal in command: .."),
        ("X=../y cmd", "Unsafe path traversal in command: X=../y"),
        ("curl file:///etc/passwd", "Unsafe file:// URL in command: file:///etc/passwd"),
        ("curl FILE://x", "Unsafe file:// URL in command: FILE://x"),
        ("cd", "Unsafe working directory change in command: cd"),
        ("cd -", "Unsafe working directory change in command: cd -"),
        ("cd ~", "Unsafe working directory change in command: cd ~"),
        ("cd ~root/x", "Unsafe working directory change in command: cd ~root/x"),
        ("cd $HOME", "Unsafe working directory change in command: cd $HOME"),
        ("cd \"$X\"", "Unsafe working directory change in command: cd $X"),
        ("cd `x`", "Unsafe working directory change in command: cd $()"),
        ("cd /etc && ls", "Unsafe working directory change in command: cd /etc"),
        ("ls && cd -P /", "Unsafe working directory change in command: cd /"),
        ("builtin cd /usr/bin/x/..", "Unsafe path traversal in command: /usr/bin/x/.."),
        ("X=1 command cd /", "Unsafe working directory change in command: cd /"),
        ("pushd", "Unsafe working directory change in command: pushd"),
        ("ls $(x) /", "Unsafe absolute paths in command: /"),
        ("echo $(cd sub && ls)", "Unsafe working directory change in command: cd sub"),
    ],
)  # fmt: skip
def test_commands_that_name_something_outside_are_refused_with_what_is_allowed(command: str, words: str) -> None:
    with pytest.raises(PermissionDenied) as refused:
        check_command(PATHS, command)
    assert str(refused.value).startswith(words)
    assert str(refused.value).endswith(f"Use paths under {ROOTS}")


def test_an_argv_is_looked_at_word_by_word_and_a_shells_script_as_a_command() -> None:
    check_argv(PATHS, ["printf", "%s", "a; cd"])
    check_argv(PATHS, ["bash", "-c", "ls /tmp"])
    for argv in (
        ["cat", "/etc/passwd"],
        ["ls", ".."],
        ["bash", "-c", "cd /"],
        ["/bin/sh", "-ec", "echo $(cat /etc/x)"],
    ):
        with pytest.raises(PermissionDenied):
            check_argv(PATHS, argv)


@given(st.text(alphabet="ab /.'\"\\$(){}`<>&|;#\n=~-", max_size=60))
def test_whatever_the_command_line_the_answer_is_yes_or_a_typed_no(command: str) -> None:
    try:
        check_command(PATHS, command)
    except PermissionDenied:
        pass


@given(st.lists(st.text("abc/.-_", min_size=1, max_size=8), max_size=6))
def test_plain_words_come_out_as_they_went_in(plain: list[str]) -> None:
    words = list(words_of(" ".join(plain)))
    assert [word.text for word in words] == plain
    assert [word.first for word in words] == [number == 0 for number in range(len(plain))]


@pytest.mark.parametrize(
    "piece",
    ["$(", "`", "<", "(", '"$(', "/a ", "'", "<<E\n", "\\", "..", "/../", "a/", "${", "a", "{a", "x://", "/tmp "],
)
def test_a_huge_command_line_is_looked_at_in_time(piece: str) -> None:
    began = time.process_time()
    try:
        check_command(PATHS, piece * (200_000 // len(piece)))
        PATHS.mask(PATHS.translate(piece * (200_000 // len(piece))))
    except PermissionDenied:
        pass
    assert time.process_time() - began < 5


# --- shell and environment -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "platform", "shell"),
    [
        ({"/bin/zsh", "/bin/bash", "/bin/sh"}, "linux", "/bin/zsh"),
        ({"/usr/bin/zsh", "/bin/bash", "/bin/sh"}, "darwin", "/usr/bin/zsh"),
        ({"/bin/bash", "/bin/sh"}, "linux", "/bin/bash"),
        ({"/usr/local/bin/bash", "/bin/sh"}, "freebsd14", "/usr/local/bin/bash"),
        ({"/bin/sh"}, "linux", "/bin/sh"),
        ({"sh"}, "linux", "sh"),
        ({"pwsh.exe", "powershell.exe", "cmd.exe", "/bin/bash"}, "win32", "pwsh.exe"),
        ({"powershell.exe", "cmd.exe"}, "win32", "powershell.exe"),
        ({"cmd.exe"}, "win32", "cmd.exe"),
        (set(), "win32", None),
        ({"cmd.exe"}, "linux", None),
    ],
)
def test_the_first_shell_that_is_there_is_taken(there: set[str], platform: str, shell: str | None) -> None:
    assert choose_shell(there.__contains__, platform) == shell


@pytest.mark.parametrize(
    "name",
    ["API_KEY", "my_key_2", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "DB_PASSWORD", "PASSPHRASE", "GOOGLE_CREDENTIALS",
     "SENTRY_DSN", "DATABASE_URL", "REDIS_URL", "MYSQL_PWD", "GH_PAT", "SSH_AUTH_SOCK", "SANDFLEET_REDIS_URL",
     "SANDFLEET_NODE_ID", "CONNECTION_STRING", "KUBECONFIG", "HOME", "PWD", "BASH_ENV", "BASH_FUNC_x%%", "1X"],
)  # fmt: skip
def test_secrets_and_the_workers_own_are_not_inherited(name: str) -> None:
    assert inherited_environment({name: "x"}, {}) == {}


def test_a_url_with_a_token_for_a_user_is_a_secret_and_one_with_a_name_is_none() -> None:
    assert inherited_environment({"INDEX": "https://ghp_0123456789abcdef@host/x"}, {}) == {}
    assert inherited_environment({"REPO": "ssh://git@host/x"}, {}) == {"REPO": "ssh://git@host/x"}


def test_a_url_with_a_password_is_a_secret_whatever_its_name() -> None:
    assert inherited_environment({"BROKER": "redis://:hunter2@host/0", "INDEX": "https://host/x"}, {}) == {
        "INDEX": "https://host/x"
    }


def test_ordinary_variables_are_inherited_and_injected_ones_win() -> None:
    seen = inherited_environment({"PATH": "/bin", "LANG": "C", "EDITOR": "vi"}, {"EDITOR": "ed", "API_KEY": "wanted"})
    assert seen == {"PATH": "/bin", "LANG": "C", "EDITOR": "ed", "API_KEY": "wanted"}
