"""What is shown of settings loads again, never holds a secret, and what `config init` writes is right."""

from __future__ import annotations

import json
import os
import re
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandfleet.cli import main
from sandfleet.config import Settings, load_settings
from sandfleet.config.environ import to_environ
from sandfleet.config.keys import Leaf, leaf_by_env, leaf_by_key, leaf_by_name, leaves
from sandfleet.config.reference import page
from sandfleet.config.seeds import ALIASES, NO_EFFECT
from sandfleet.config.showing import as_document, as_yaml, scrubbed, starter
from sandfleet.errors import ConfigError

ROOT = Path(__file__).parents[2]
SECRET = "hunter2-do-not-tell"

# --- any settings there can be ---------------------------------------------------------------------

TEXT = st.text(string.ascii_letters + string.digits + " $#:'\"{}[],&*!%@`-é✓\\", min_size=1, max_size=12)
NAME = st.text(string.ascii_letters + "_", min_size=1, max_size=8)
MOUNTS = st.lists(
    st.builds(
        lambda name, host, read_only: {
            "host_path": f"/srv/{host}",
            "container_path": f"/mnt/x-{name}",
            "read_only": read_only,
        },
        NAME,
        NAME,
        st.booleans(),
    ),
    max_size=2,
    unique_by=lambda mount: mount["container_path"],
)
OF_THEIR_OWN: dict[str, st.SearchStrategy[Any]] = {
    "redis_url": st.sampled_from(["redis://h:1/2", "rediss://10.0.0.1/0", "unix:///run/r.sock"]),
    "node_id": st.from_regex(r"\A[a-z0-9][a-z0-9-]{0,10}\Z"),
    "use": st.sampled_from(["", "my.package:Provider"]),
    "skills_container_path": st.sampled_from(["/mnt/skills", "/opt/skills"]),
    "container_prefix": st.from_regex(r"\A[a-z][a-z0-9_.-]{0,10}\Z"),
    "environment": st.dictionaries(NAME, TEXT, max_size=3),
    "mounts": MOUNTS,
    "provisioner_url": st.just(""),
    "env_inherit": st.just(()),
    "metrics_address": st.sampled_from(["", "127.0.0.1:0", "0.0.0.0:9100"]),
}


def values_of(leaf: Leaf) -> st.SearchStrategy[Any]:
    if leaf.name in OF_THEIR_OWN:
        return OF_THEIR_OWN[leaf.name]
    if leaf.shape == "list":
        return st.lists(TEXT, max_size=3)
    if leaf.shape == "mapping":
        return st.dictionaries(TEXT, TEXT, max_size=3)
    if leaf.is_flag:
        return st.booleans()
    if leaf.is_path:
        return NAME.map(lambda name: Path("/srv") / name)
    choices = re.findall(r"`([^`]+)`", leaf.type_text)
    if choices:
        return st.sampled_from(choices)
    if any(hasattr(rule, "pattern") for rule in leaf.info.metadata):
        return st.just(leaf.default())
    if leaf.type_text == "text":
        return TEXT if leaf.default() != "" else st.one_of(st.just(""), TEXT)
    low = next((bound.ge if hasattr(bound, "ge") else bound.gt + 1 for bound in leaf.info.metadata
                if hasattr(bound, "ge") or hasattr(bound, "gt")), 0)  # fmt: skip
    high = next((bound.le for bound in leaf.info.metadata if hasattr(bound, "le")), 10**9)
    numbers: st.SearchStrategy[Any] = st.integers(int(low), int(high))
    return numbers if isinstance(leaf.default(), int) else numbers.map(float)


ANY = st.fixed_dictionaries({}, optional={leaf.name: values_of(leaf) for leaf in leaves()})


@given(ANY)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_settings_come_back_from_the_environment_of_a_child(values: dict[str, Any]) -> None:
    meant = load_settings({}, **values).settings
    assert Settings.load(to_environ(meant)) == meant


@given(values=ANY)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_what_is_shown_loads_again_as_the_same(tmp_path: Path, values: dict[str, Any]) -> None:
    open_values = {name: value for name, value in values.items() if not leaf_by_name()[name].secret}
    loaded = load_settings({}, **open_values)
    shown = tmp_path / "shown.yaml"
    shown.write_text(as_yaml(loaded))
    assert load_settings({}, config=shown).settings == loaded.settings
    shown.write_text(as_yaml(loaded, only_set=True))
    assert load_settings({}, config=shown).settings == loaded.settings


# --- secrets -------------------------------------------------------------------------------------


def full_of_secrets(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "sandfleet.yaml"
    file.write_text(
        f"""
redis: {{url: "redis://user:{SECRET}@h:6379/0?password={SECRET}"}}
sandbox:
  backend: kubernetes
  provisioner_url: http://me:{SECRET}@p:8002
  provisioner_api_key: {SECRET}
  http_proxy: http://{SECRET}@proxy:80
  access_key: {SECRET}
  secret_key: {SECRET}
  alert_webhook: https://hooks.example.com/{SECRET}
  environment: {{API_KEY: {SECRET}}}
  env_inherit: [INHERITED]
"""
    )
    return {"SANDFLEET_CONFIG": str(file), "INHERITED": SECRET}


def test_no_secret_is_shown_anywhere(tmp_path: Path) -> None:
    loaded = load_settings(full_of_secrets(tmp_path))
    assert loaded.settings.environment == {"API_KEY": SECRET, "INHERITED": SECRET}
    assert SECRET in loaded.settings.redis_url
    for shown in (as_yaml(loaded), json.dumps(as_document(loaded)), repr(loaded.settings), str(loaded.notices)):
        assert SECRET not in shown
    assert "API_KEY: (hidden)" in as_yaml(loaded)


def test_of_a_url_only_the_secret_is_hidden(tmp_path: Path) -> None:
    shown = as_document(load_settings(full_of_secrets(tmp_path)))["settings"]
    assert shown["sandbox.http_proxy"]["value"] == "http://***@proxy:80"
    assert shown["redis.url"]["value"] == "redis://***@h:6379/0?***"
    assert shown["redis.url"]["hidden"] is True


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@h:6379/0", "redis://***@h:6379/0"),
        ("redis://u:p@[::1]:6379/0", "redis://***@[::1]:6379/0"),
        ("redis://h/0?password=pw", "redis://h/0?***"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("http://[broken", "(hidden)"),
        ("redis://:p/w@h:6379/0", "(hidden)"),
        ("redis://:p#w@h:6379/0", "(hidden)"),
        ("redis://:p?w@h:6379/0", "(hidden)"),
        ("redis://:12/34@h:6379/0", "(hidden)"),
    ],
)
def test_urls_are_shown_without_credentials(url: str, shown: str) -> None:
    assert scrubbed(url) == shown


# --- the table -----------------------------------------------------------------------------------


def test_every_setting_has_one_key_one_variable_and_a_description() -> None:
    assert len(leaf_by_key()) == len(leaf_by_env()) == len(leaf_by_name()) == len(leaves())
    for leaf in leaves():
        assert leaf.info.description, leaf.key
        assert leaf.type_text, leaf.key
        assert not re.match(r"SANDFLEET_(SERVICE|PORT)(_|$)", leaf.env), "Kubernetes sets it in pods"


def test_every_alias_leads_to_a_setting_and_hides_none() -> None:
    for key, alias in ALIASES.items():
        assert alias.name in leaf_by_name()
        assert key not in leaf_by_key()
    assert not set(NO_EFFECT) & (set(leaf_by_key()) | set(ALIASES))


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == page(), "`make docs` writes it anew"


def test_the_reference_page_has_every_key_and_names_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/whoever-makes-it")
    assert "whoever-makes-it" in str(Settings().data_root), "the defaults follow the home directory"
    text = page()
    for leaf in leaves():
        assert f"`{leaf.key}`" in text
        assert f"`{leaf.env}`" in text
    for key in (*ALIASES, *NO_EFFECT):
        assert f"`{key}`" in text
    assert "whoever-makes-it" not in text
    assert str(Settings().run_root) not in text


def test_the_example_on_the_reference_page_loads(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", page(), flags=re.DOTALL)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        assert load_settings({}, config=file).found


# --- sandfleet config ----------------------------------------------------------------------------


@pytest.fixture
def empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("SANDFLEET_")] + ["REDIS_URL"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("SANDFLEET_RUN_ROOT", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_to_begin_with_loads_and_is_all_defaults(empty_directory: Path) -> None:
    assert main(["config", "init"]) == 0
    file = Path("sandfleet.yaml")
    assert file.read_text() == starter()
    assert file.stat().st_mode & 0o077 == 0
    assert load_settings({}, config=file).settings == Settings()
    assert load_settings({}, config=file).notices == ()


def test_every_line_of_it_may_be_uncommented(empty_directory: Path) -> None:
    # `# key: value` on a line of its own, at the depth of its section; prose has no such form.
    keys = {leaf.key.rpartition(".")[2] for leaf in leaves()}
    lines = [
        re.sub(r"^(\s*)# (\w+)(?=: )", lambda m: m[0].replace("# ", "") if m[2] in keys else m[0], line)
        for line in starter().splitlines()
    ]
    file = empty_directory / "all.yaml"
    file.write_text("\n".join(line for line in lines if not line.startswith("#")))
    written = yaml.safe_load(file.read_text())
    assert sum(len(section) for section in written.values()) >= len(leaves()) - 5
    loaded = load_settings({}, config=file)
    for leaf in leaves():
        assert leaf.name in loaded.found or leaf.of(loaded.settings) == leaf.default(), leaf.key
        if leaf.name not in ("run_root", "data_root"):
            assert leaf.of(loaded.settings) == leaf.default(), leaf.key


def test_init_writes_over_nothing_unless_told(empty_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = empty_directory / "deep" / "mine.yaml"
    assert main(["config", "init", str(file)]) == 0
    file.write_text("sandbox: {replicas: 3}\n")
    assert main(["config", "init", str(file)]) == 2
    assert "--force" in capsys.readouterr().err
    assert file.read_text() == "sandbox: {replicas: 3}\n"
    assert main(["config", "init", "--force", str(file)]) == 0
    assert file.read_text() == starter()


def test_init_tells_why_it_cannot_write(empty_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty_directory / "file").write_text("")
    assert main(["config", "init", "file/below.yaml"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_show_prints_what_is_in_force_and_where_it_comes_from(
    empty_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("sandfleet.yaml").write_text("sandbox:\n  replicas: 3\nredis: {url: 'redis://:pw@h/0'}\n")
    monkeypatch.setenv("SANDFLEET_MAX_AGE_S", "90")
    assert main(["config", "show", "--set"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  replicas: 3 +# sandfleet\.yaml:2$", shown, flags=re.MULTILINE)
    assert re.search(r"^  max_age_s: 90\.0 +# SANDFLEET_MAX_AGE_S$", shown, flags=re.MULTILINE)
    assert re.search(r"^  # url: redis://\*\*\*@h/0 +# sandfleet\.yaml:3$", shown, flags=re.MULTILINE)
    assert main(["config", "show", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file"] == "sandfleet.yaml"
    assert set(document["settings"]) == set(leaf_by_key())
    assert document["settings"]["sandbox.replicas"] == {
        "value": 3,
        "hidden": False,
        "source": "sandfleet.yaml:2",
        "env": "SANDFLEET_REPLICAS",
    }
    assert document["settings"]["sandbox.burst_limit"]["source"] == "default"


def test_check_tells_once_what_is_not_on_this_machine(
    empty_directory: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    mount = "{host_path: /there/is/no/such, container_path: /mnt/x}"
    Path("sandfleet.yaml").write_text(
        f"sandbox: {{use: no_such_package.mod:Own, backend: kubernetes, mounts: [{mount}], blocked_paths: [/a]}}\n"
    )
    assert main(["config", "check"]) == 0
    out = capsys.readouterr().out
    assert "there is no package no_such_package on this machine" in out
    assert "host_path /there/is/no/such does not exist on this node" in out
    assert "no backend kubernetes is installed on this machine\n" in out
    assert "blocked_paths` is checked but not enforced" in out
    assert not caplog.records


def test_check_says_what_is_wrong_and_what_deserves_a_word(
    empty_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["config", "check"]) == 0
    assert "no configuration file" in capsys.readouterr().out
    Path("sandfleet.yaml").write_text("sandbox:\n  use: src.sandbox.local:LocalSandboxProvider\n")
    monkeypatch.setenv("SANDFLEET_REPLICSA", "3")
    assert main(["config", "check"]) == 0
    out, err = capsys.readouterr()
    assert "sandfleet.yaml is fine" in out
    assert "note: sandbox.use: " in out
    assert "SANDFLEET_REPLICSA is no setting; did you mean `SANDFLEET_REPLICAS`?" in err
    Path("sandfleet.yaml").write_text("sandbox: {backend: locl}\n")
    assert main(["config", "check"]) == 0
    assert "no backend locl is installed on this machine; did you mean `local`?" in capsys.readouterr().out
    Path("wrong.yaml").write_text("sandbox:\n  replicsa: 3\n")
    assert main(["config", "check", "wrong.yaml"]) == 2
    assert "wrong.yaml:2: sandbox.replicsa" in capsys.readouterr().err
    assert main(["config", "check", "wrong.yaml", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["facts"]["line"] == 2


def test_the_option_names_the_file_before_and_after_the_command_and_for_this_call_only(
    empty_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("sandbox: {replicas: 77}\n")
    for words in (["--config", "mine.yaml", "config", "show"], ["config", "show", "--config", "mine.yaml"]):
        assert main(words) == 0
        assert "replicas: 77" in capsys.readouterr().out
        assert "SANDFLEET_CONFIG" not in os.environ
    assert main(["--config", "none.yaml", "nodes"]) == 2
    assert "none.yaml does not exist" in capsys.readouterr().err


def test_a_file_cannot_move_the_cursor_by_what_is_shown_of_it(
    empty_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sandfleet.yaml").write_text('node: {id: "a\\e[2Jb"}\n"\\e[2J": 3\n')
    assert main(["config", "check"]) == 2
    assert "\x1b" not in capsys.readouterr().err
    Path("sandfleet.yaml").write_text('node: {labels: {a: "a\\e[2Jb"}}\n')
    assert main(["config", "show"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_an_error_of_the_configuration_is_one_line_of_every_command(
    empty_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sandfleet.yaml").write_text("sandbox:\n  replicas: none\n")
    for words in (["ls"], ["worker"], ["up"], ["exec", "--thread", "t", "--", "true"]):
        assert main(words) == 2
        assert "sandfleet.yaml:2: sandbox.replicas" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        Settings.load()
