"""What sandboxd does itself so that an idle one stays small: each does what the standard library's version does."""

from __future__ import annotations

import binascii
import hashlib
import hmac
import json
import math
import re
import shlex
import signal
import subprocess
import sys
from typing import Any
from urllib.parse import parse_qsl, quote_from_bytes, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet_workers.sandboxd import PATH, sandboxd
from tests.sandboxd.conftest import Sandboxd

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
#: A command line that any shell would merely split at blanks: what `plain_argv` recognises without `re`.
PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_@%+:,./-]*(?: [A-Za-z0-9_@%+:,./=-]+)*")


def test_an_idle_server_has_loaded_nothing_large() -> None:
    program = f"import sys; sys.path.insert(0, {str(PATH.parent)!r}); import sandboxd; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    large = {"collections", "ctypes", "enum", "functools", "hashlib", "json", "re", "socket", "typing", "urllib"}
    assert "sandboxd" in done.stdout.split()
    assert not large & set(done.stdout.split())


@given(values)
def test_json_is_written_and_read_as_json(value: Any) -> None:
    written = sandboxd.to_json(value)
    assert json.loads(written) == value
    assert sandboxd.from_json(written) == value
    assert sandboxd.from_json(json.dumps(value, indent=1).encode()) == value


@given(st.text('{}[]",:0123456789.eE+-truefalsn \n\t\\u', max_size=30))
def test_what_is_no_json_is_refused(text: str) -> None:
    try:
        wanted = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            sandboxd.from_json(text.encode())
    else:
        assert sandboxd.from_json(text.encode()) == wanted


def test_names_that_are_not_utf8_and_odd_numbers_survive_json() -> None:
    assert json.loads(sandboxd.to_json({"path": "caf\udce9", "text": "日本"})) == {"path": "caf\udce9", "text": "日本"}
    assert math.isnan(sandboxd.from_json(b"NaN"))
    assert sandboxd.from_json(b"[-Infinity]") == [-math.inf]


@given(st.binary(max_size=40), st.text("AQZaqz059+/=\n -", max_size=12))
def test_base64_is_strict(data: bytes, text: str) -> None:
    assert sandboxd.unbase64(sandboxd.to_base64(data), "x") == data
    if BASE64.fullmatch(text):
        assert sandboxd.unbase64(text, "x") == binascii.a2b_base64(text)
    else:
        with pytest.raises(sandboxd.ApiError):
            sandboxd.unbase64(text, "x")


@given(st.text())
def test_a_word_of_a_shell_is_quoted_as_by_shlex(text: str) -> None:
    assert sandboxd.quoted(text) == shlex.quote(text)


@given(st.text("ab0 _./-@%+:,=$~'\"é\n", max_size=12))
def test_a_plain_command_needs_no_shell_and_no_other_is_taken_for_one(command: str) -> None:
    plain = PLAIN.fullmatch(command) is not None and command.split(" ")[0] not in sandboxd.SHELL_WORDS
    assert sandboxd.plain_argv(command, {}) == (command.split(" ") if plain else None)


@given(st.binary(), st.text("%0aAfF2xé+", max_size=10))
def test_parts_of_urls_are_unquoted(data: bytes, text: str) -> None:
    quoted = quote_from_bytes(data)
    assert sandboxd.unquoted(quoted, "surrogateescape") == data.decode("utf-8", "surrogateescape")
    if text.isascii():
        assert sandboxd.unquoted(text) == unquote(text)


class _Query(sandboxd.Request):
    def __init__(self, query: str) -> None:
        self.query = query


@given(st.text("ab=&+%412 ", max_size=14))
def test_a_query_is_taken_apart_as_by_the_standard_library(query: str) -> None:
    assert _Query(query).params().body == dict(parse_qsl(query, keep_blank_values=True, errors="surrogateescape"))


@given(st.binary(max_size=100), st.binary(max_size=64))
def test_the_proof_is_an_hmac(key: bytes, data: bytes) -> None:
    assert sandboxd.hmac_sha256(key, data) == hmac.new(key, data, hashlib.sha256).hexdigest()


@pytest.mark.parametrize("size", [0, 1, sandboxd.DIGEST_LIMIT, sandboxd.DIGEST_LIMIT + 1])
def test_digests_of_any_size_are_sha256(size: int) -> None:
    assert sandboxd.digest_bytes(b"x" * size) == hashlib.sha256(b"x" * size).hexdigest()


def test_signals_have_the_names_of_the_standard_library() -> None:
    assert {int(found): found.name for found in signal.Signals} == sandboxd.SIGNAL_NAMES


# --- output as it is ----------------------------------------------------------------------------


def raw(box: Sandboxd, **fields: Any) -> tuple[Any, bytes, bytes]:
    answer = box.exec(encoding="raw", **fields)
    head, _, follow = answer.body.partition(b"\n")
    data = json.loads(head)["data"]
    stdout, stderr = data["raw"]
    assert len(follow) == stdout + stderr
    return data, follow[:stdout], follow[stdout:]


def test_raw_output_is_the_bytes_as_they_were(box: Sandboxd) -> None:
    data, stdout, stderr = raw(box, command=r"printf 'a\n\377\0'; printf '\376\n' >&2; exit 3")
    assert (stdout, stderr, data["exit_code"]) == (b"a\n\xff\0", b"\xfe\n", 3)
    assert data["stdout"] is data["stderr"] is None
    assert raw(box, command="true")[1:] == (b"", b"")


def test_raw_output_that_was_cut_tells_where(box: Sandboxd) -> None:
    data, stdout, _ = raw(box, command="seq 100000", max_output_length=1000)
    whole = "".join(f"{n}\n" for n in range(1, 100_001)).encode()
    assert stdout == whole[:500] + whole[-500:]
    assert (data["stdout_gap_at"], data["stdout_discarded"]) == (500, len(whole) - 1000)


def test_a_large_raw_output_can_be_asked_for_again(box: Sandboxd) -> None:
    _, stdout, stderr = raw(box, command="head -c 3000000 /dev/zero | tr '\\0' x", max_output_length=0, op_id="big")
    assert (stdout, stderr) == (b"x" * 3_000_000, b"")
    again = box.post("sandfleet/op", op_id="big", encoding="raw")
    assert again.body.partition(b"\n")[2] == stdout
    assert box.post("shell/exec", command="true", encoding="raw").code == "invalid_argument"


def test_a_running_command_tells_raw_what_it_wrote_so_far(box: Sandboxd) -> None:
    box.exec("echo begun; sleep 60", async_mode=True, op_id="long")
    box.post("bash/output", op_id="long", wait=True)
    head, _, follow = box.post("sandfleet/op", op_id="long", encoding="raw").body.partition(b"\n")
    assert json.loads(head)["data"]["status"] == "running"
    assert follow == b"begun\n"
    box.post("bash/kill", op_id="long", signal="SIGKILL")
