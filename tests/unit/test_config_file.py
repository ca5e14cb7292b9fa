"""The file: where it is found, what it says when it is wrong, and that nothing in it can hang or flood a process."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from sandfleet.config import Loaded, Settings, load_settings
from sandfleet.errors import ConfigError


@pytest.fixture
def nobody_named_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory and a home of the test's own, and no variable that says anything."""
    for name in [name for name in os.environ if name.startswith("SANDFLEET_")] + ["REDIS_URL"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


def load(tmp_path: Path, text: str | bytes, **environ: str) -> Loaded:
    file = tmp_path / "sandfleet.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_settings(environ, config=file)


def refusal(tmp_path: Path, text: str | bytes, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text, **environ)
    assert str(tmp_path / "sandfleet.yaml") in str(refused.value)
    assert refused.value.code == "config_invalid"
    return refused.value


# --- where it is found ---------------------------------------------------------------------------


def test_the_working_directory_comes_before_the_home_directory(nobody_named_a_file: Path) -> None:
    assert load_settings().file is None
    at_home = nobody_named_a_file / "home" / ".config" / "sandfleet" / "config.yaml"
    at_home.parent.mkdir(parents=True)
    at_home.write_text("sandbox: {replicas: 1}\n")
    assert (load_settings().file, Settings.load().replicas) == (at_home, 1)
    Path("sandfleet.yaml").write_text("sandbox: {replicas: 2}\n")
    assert Settings.load().replicas == 2


def test_xdg_config_home_is_where_the_home_directory_is_looked_into(
    nobody_named_a_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(nobody_named_a_file / "xdg"))
    (nobody_named_a_file / "xdg" / "sandfleet").mkdir(parents=True)
    (nobody_named_a_file / "xdg" / "sandfleet" / "config.yaml").write_text("sandbox: {replicas: 5}\n")
    assert Settings.load().replicas == 5


def test_a_file_that_is_named_is_read_and_no_other(nobody_named_a_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sandfleet.yaml").write_text("sandbox: {replicas: 2, max_per_user: 9}\n")
    Path("named.yaml").write_text("sandbox: {replicas: 3}\n")
    monkeypatch.setenv("SANDFLEET_CONFIG", "named.yaml")
    assert (Settings.load().replicas, Settings.load().max_per_user) == (3, 0)
    Path("argument.yaml").write_text("sandbox: {replicas: 4}\n")
    assert Settings.load(config="argument.yaml").replicas == 4
    monkeypatch.setenv("SANDFLEET_CONFIG", os.devnull)
    assert Settings.load().replicas == 16


def test_an_environment_that_is_given_looks_for_no_file(nobody_named_a_file: Path) -> None:
    Path("sandfleet.yaml").write_text("sandbox: {replicas: 2}\n")
    assert Settings.load({}).replicas == 16
    assert Settings.load({"SANDFLEET_CONFIG": "sandfleet.yaml"}).replicas == 2


def test_a_file_that_anybody_may_write_is_read_only_when_it_is_named(nobody_named_a_file: Path) -> None:
    # Somebody could plant one in /tmp and send our commands to a Redis of theirs.
    planted = Path("sandfleet.yaml")
    planted.write_text("redis: {url: redis://evil.example:6379/0}\n")
    planted.chmod(0o666)
    with pytest.raises(ConfigError, match="belongs to somebody else, or everybody may write to it"):
        load_settings()
    assert load_settings(config=planted).settings.redis_url == "redis://evil.example:6379/0"


# --- what cannot be read -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n\n", "# only words\n", "---\n", "null\n", "~\n"])
def test_an_empty_file_is_refused_with_what_writes_one(tmp_path: Path, text: str) -> None:
    error = refusal(tmp_path, text)
    assert "is empty" in str(error)
    assert "sandfleet config init" in str(error)


def test_a_file_of_empty_sections_is_all_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "sandbox:\nredis:\n").settings == Settings.load({})
    assert load(tmp_path, "{}\n").settings == Settings.load({})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml does not exist; .*config init"):
        load_settings({}, config=tmp_path / "nothing.yaml")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        load_settings({}, config=tmp_path)


def test_a_pipe_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        load_settings({}, config=tmp_path / "pipe")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/tty"])
def test_a_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError):
        load_settings({}, config=device)


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sandfleet.yaml"
    file.write_text("sandbox: {}\n")

    def refuse(*args: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")  # root would be let in

    monkeypatch.setattr("sandfleet.config.document.os.open", refuse)
    with pytest.raises(ConfigError, match=r"sandfleet\.yaml cannot be read: Permission denied"):
        load_settings({}, config=file)


def test_a_name_with_a_nul_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings({}, config="a\0b")


def test_a_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    error = refusal(tmp_path, b"sandbox:\n  backend: caf\xe9\n")
    assert "is not UTF-8" in str(error)
    assert error.facts["line"] == 2
    assert "is not UTF-8" in str(refusal(tmp_path, "sandbox: {}\n".encode("utf-16")))


def test_a_byte_order_mark_is_no_harm(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeffsandbox: {replicas: 3}\n").settings.replicas == 3


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    assert "larger than" in str(refusal(tmp_path, b"#" * (256 * 1024 + 1)))


@pytest.mark.parametrize(
    "text", ["a: [" + "a," * 100_000 + "]", "a:\n" + "- a\n" * 60_000, "".join(f"k{n}: 1\n" for n in range(20_000))]
)
def test_a_file_of_very_many_values_is_refused_early(tmp_path: Path, text: str) -> None:
    started = time.monotonic()
    assert "holds more than 5000 values" in str(refusal(tmp_path, text))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("sandbox:\n  replicas: [1, 2\n", 3),
        ("sandbox:\n\treplicas: 1\n", 2),
        ("sandbox: 'no end\n", 2),
        ("sandbox:\n  a: *nowhere\n", 2),
        ("a: 1\n---\nb: 2\n", 2),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    error = refusal(tmp_path, text)
    assert "is not valid YAML" in str(error)
    assert error.facts["line"] == line


def test_a_mistake_does_not_repeat_the_password_beside_it(tmp_path: Path) -> None:
    for text in (
        "redis:\n  url: 'redis://:hunter2@h/0\n",
        "redis: {url: rediss//:hunter2@h}\n",
        "sandbox:\n  environment: {API_KEY: [hunter2]}\n",
        "sandbox:\n  provisioner_api_key: {a: hunter2}\n",
        "sandbox:\n  memory_bytes: hunter2\n",
    ):
        assert "hunter2" not in str(refusal(tmp_path, text).to_wire())


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "42\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "is no mapping" in str(refusal(tmp_path, text))


def test_control_characters_are_refused(tmp_path: Path) -> None:
    assert "characters that YAML does not allow" in str(refusal(tmp_path, b"sandbox: \x00\n"))


def test_a_tag_constructs_nothing(tmp_path: Path) -> None:
    error = refusal(tmp_path, "sandbox:\n  backend: !!python/object/apply:os.system ['touch /tmp/x']\n")
    assert error.facts["line"] == 2


@pytest.mark.parametrize(
    "text",
    ["sandbox: !mine {replicas: 2}\n", "sandbox:\n  environment: !!set {A, B}\n", "sandbox:\n  image: !!binary aGk=\n"],
)
def test_a_tag_is_refused_where_it_would_change_nothing(tmp_path: Path, text: str) -> None:
    assert "means nothing here; take it out" in str(refusal(tmp_path, text))


@pytest.mark.parametrize("value", ["2026-13-45", "!!int words", "!!float words", "1" * 5000])
def test_a_scalar_that_cannot_be_read_is_refused(tmp_path: Path, value: str) -> None:
    assert refusal(tmp_path, f"sandbox:\n  replicas: {value}\n").facts["line"] == 2


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    error = refusal(tmp_path, "sandbox:\n  replicas: 1\n  backend: mock\n  replicas: 2\n")
    assert "sandbox.replicas is given twice, in line 2 too" in str(error)
    assert error.facts["line"] == 4


def test_a_setting_under_two_names_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, "sandbox:\n  idle_timeout: 1\n  idle_timeout_s: 2\n")
    assert "sandbox.idle_timeout_s: is the same setting as `sandbox.idle_timeout` in line 2" in str(error)


def test_aliases_are_bounded(tmp_path: Path) -> None:
    # "Billion laughs": ten lines that stand for ten thousand million values.
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    started = time.monotonic()
    assert "when its aliases are followed" in str(refusal(tmp_path, "\n".join(lines)))
    assert time.monotonic() - started < 5


def test_an_alias_of_itself_is_refused(tmp_path: Path) -> None:
    assert "nested deeper" in str(refusal(tmp_path, "sandbox: &s\n  config: *s\n"))


@pytest.mark.parametrize("text", ["[" * 50_000, "{a: " * 5000, "sandbox: " + "[" * 100 + "]" * 100])
def test_a_deep_file_is_refused(tmp_path: Path, text: str) -> None:
    assert "nested deeper" in str(refusal(tmp_path, text))


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    text = "sandbox:\n  environment: {<<: &shared {A: 1, B: 2}, B: 3}\nnode:\n  labels: *shared\n"
    settings = load(tmp_path, text).settings
    assert (settings.environment, settings.labels) == ({"A": "1", "B": "3"}, {"A": "1", "B": "2"})
    assert "needs a mapping" in str(refusal(tmp_path, "sandbox:\n  <<: 3\n"))
    assert "is no text" in str(refusal(tmp_path, "sandbox:\n  [a, b]: 3\n"))
