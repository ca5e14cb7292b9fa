"""What an AIO image is asked to run where its HTTP API has no route, or one that tells too little. Pure.

They need bash and GNU coreutils and findutils, which every such image has. A script's arguments are file names as
bytes; what it says on success is base64 (or plain numbers), so that nothing the API does to text can change it. On
failure it exits with one of `Code`, or with `Code.TOOL` after the message of the tool that failed.
"""

from __future__ import annotations

import os
import shlex
from enum import IntEnum

from sandfleet_workers.backends.docker.exec_patterns import IGNORE

__all__ = [
    "GLOB",
    "LIST",
    "MAKE_DIR",
    "MAKE_LINK",
    "METRICS",
    "MOVE",
    "READ",
    "REMOVE",
    "STAT",
    "WRITE",
    "Code",
    "quoted",
    "script_line",
]  # fmt: skip


class Code(IntEnum):
    """Exit codes of the scripts; none of them is a tool's own."""

    DIRECTORY = 71
    NOT_DIRECTORY = 72
    NOT_REGULAR = 73
    DENIED = 74
    EXISTS = 75
    DIGEST = 76
    SIZE = 77
    NOT_EMPTY = 78
    INVALID = 79
    TIMEOUT = 80
    TOOL = 81


def quoted(text: str) -> str:
    """A word of a bash command line, in ASCII whatever bytes it stands for."""
    raw = os.fsencode(text)
    if raw.isascii() and raw.decode().isprintable():
        return shlex.quote(text)
    return "$'" + "".join(_escaped(byte) for byte in raw) + "'"


def _escaped(byte: int) -> str:
    char = chr(byte)
    return char if char.isascii() and char.isprintable() and char not in "\\'" else f"\\{byte:03o}"


def script_line(script: str, *arguments: str) -> str:
    """The command line that runs a script with its arguments; what it says on stderr comes on stdout."""
    words = " ".join(quoted(argument) for argument in arguments)
    return f"bash -c {shlex.quote(_PRELUDE + script)} sandfleet {words} </dev/null 2>&1"


_PRELUDE = """export LC_ALL=C; set -f +x
fail() { printf %s "${2-}"; exit "$1"; }
there() { ls -dL -- "$1" >/dev/null || exit 81; }
there_itself() { ls -d -- "$1" >/dev/null || exit 81; }
folder() {
  there "$1"; [ -d "$1" ] || exit 72; [ -r "$1" ] && [ -x "$1" ] || exit 74
}
parents() {
  d=$(dirname -- "$1"; printf x); d=${d%?x}
  [ -L "$d" ] && [ ! -e "$d" ] && exit 72
  [ -d "$d" ] || mkdir -p -- "$d" || exit 81
}
digest() { set -- $(sha256sum <"$1"); printf %s "$1"; }
"""

#: path, follow
STAT = r"""
if [ "$2" = 1 ]; then there "$1"; how=-H; else there_itself "$1"; how=-P; fi
{ find $how "$1" -maxdepth 0 -printf '%y\0%s\0%m\0%T@\0'; readlink -n -- "${1%/}"; printf '\0'; } | base64 -w0
"""

#: path, depth, most bytes
LIST = r"""
folder "$1"
exec 3>&1
errors=$({ find "${1%/}/" -mindepth 1 -maxdepth "$2" -printf '%P\0%y\0%s\0%m\0%T@\0%l\0' |
  head -c "$3" | base64 -w0 >&3; } 2>&1 | wc -l)
printf ':%s' "$errors"
"""

_PRUNE = " -o ".join(f"-name {shlex.quote(pattern)}" for pattern in IGNORE)

#: path, seconds, most bytes
GLOB = (
    r"""
folder "$1"
exec 3>&1
errors=$({ { timeout "$2" find "${1%/}/" -mindepth 1 \( """
    + _PRUNE
    + r""" \) -prune -o -printf '%P\0%y\0'
  [ $? = 124 ] && echo timeout >&4; } | head -c "$3" | base64 -w0 >&3; } 4>&1 2>&1)
case "$errors" in *timeout*) exit 80;; esac
printf ':%s' "$(printf %s "$errors" | grep -c .)"
"""
)

#: path, offset, length (empty: to the end), most bytes that come inline; ``size:`` and the bytes, or only ``size``
READ = r"""
there "$1"; [ -d "$1" ] && exit 71; [ -f "$1" ] || exit 73; [ -r "$1" ] || exit 74
case "$1" in */) exit 72;; esac
size=$(stat -Lc %s -- "$1") || exit 81
left=$((size > $2 ? size - $2 : 0))
[ -n "$3" ] && [ "$left" -gt "$3" ] && left=$3
printf %s "$size"
[ "$left" -le "$4" ] || exit 0
printf :
tail -c "+$(($2 + 1))" -- "$1" | head -c "$left" | base64 -w0
"""

#: path, append (0 1), if_digest (- absent hex), if_size (- n), mode (- octal), parents (0 1), a file with the bytes or
#: empty, else the bytes as base64, most bytes whose digest is told after an append; ``size digest``
WRITE = r"""
[ -n "$7" ] && trap 'rm -f -- "$7"' EXIT
source_bytes() { if [ -n "$7" ]; then cat -- "$7"; else printf %s "$8" | base64 -d; fi; }
case "$1" in */ | */. | */..) exit 71;; esac
[ -d "$1" ] && exit 71
p=$(realpath -m -- "$1" && printf x) || exit 81; p=${p%?x}
if [ -e "$p" ]; then [ -f "$p" ] || exit 73; now=; else now=absent; fi
if [ "$3" != - ]; then
  [ -n "$now" ] || now=$(digest "$p"); [ "$now" = "$3" ] || fail 76 "$now"
fi
if [ "$4" != - ]; then
  size=$(stat -c %s -- "$p" 2>/dev/null || echo 0); [ "$size" = "$4" ] || fail 77 "$size"
fi
if [ "$6" = 1 ]; then parents "$p"; fi
d=$(dirname -- "$p"; printf x); d=${d%?x}
there "$d/."
if [ "$2" = 1 ]; then
  source_bytes "$@" >>"$p" || exit 81
  [ "$5" = - ] || chmod "$5" -- "$p" || exit 81
elif [ -w "$d" ]; then
  part=$d/.upload-$$$RANDOM$RANDOM.part
  source_bytes "$@" >"$part" &&
    { if [ "$5" != - ]; then chmod "$5" -- "$part"
      elif [ -e "$p" ]; then chmod "$(stat -c %a -- "$p" | tail -c 4)" -- "$part"; fi; } &&
    mv -fT -- "$part" "$p" || { rm -f -- "$part"; exit 81; }
else
  source_bytes "$@" >"$p" || exit 81
fi
size=$(stat -c %s -- "$p") || exit 81
printf '%s ' "$size"
[ "$2" = 1 ] && [ "$3" = - ] && [ "$size" -gt "$9" ] || digest "$p"
"""

#: path, parents (0 1), exist_ok (0 1), mode (- octal)
MAKE_DIR = r"""
p=$1; while [ "$p" != / ] && [ "${p%/}" != "$p" ]; do p=${p%/}; done
if [ -e "$p" ] || [ -L "$p" ]; then [ "$3" = 1 ] && [ -d "$p" ] && exit 0; exit 75; fi
if [ "$2" = 1 ]; then parents "$p"; fi
if [ "$4" = - ]; then mkdir -- "$p"; else mkdir -m "$4" -- "$p"; fi || exit 81
"""

#: path, target, overwrite (0 1)
MAKE_LINK = r"""
case "$1" in */) exit 71;; esac
parents "$1"
if [ -L "$1" ]; then
  [ "$3" = 1 ] || exit 75
  part=$(dirname -- "$1")/.upload-$$$RANDOM$RANDOM.part
  ln -sT -- "$2" "$part" && mv -fT -- "$part" "$1" || { rm -f -- "$part"; exit 81; }
elif [ -e "$1" ]; then exit 75
else ln -sT -- "$2" "$1" || exit 81; fi
"""

#: path, recursive (0 1), missing_ok (0 1)
REMOVE = r"""
if [ ! -e "$1" ] && [ ! -L "$1" ] && [ "$3" = 1 ]; then exit 0; fi
there_itself "$1"
case "${1%/}" in */. | */.. | "") exit 79;; esac
if [ ! -d "$1" ] || [ -L "$1" ]; then rm -f -- "$1" || exit 81
elif [ "$2" = 1 ]; then rm -rf -- "$1" || exit 81
elif [ -n "$(ls -A -- "$1" | head -c 1)" ]; then exit 78
else rmdir -- "$1" || exit 81; fi
"""

#: path, new path, overwrite (0 1), follow (0 1)
MOVE = r"""
to=$2
if [ "$3" = 1 ] && [ "$4" = 1 ] && [ -L "$to" ]; then to=$(realpath -m -- "$to"; printf x); to=${to%?x}; fi
if [ "$3" = 0 ] && { [ -e "$to" ] || [ -L "$to" ]; }; then exit 75; fi
[ -d "$to" ] && [ ! -d "$1" ] && exit 71
there_itself "$1"
parents "$to"
mv -fT -- "$1" "$to" || exit 81
"""

#: directory whose disk is counted; ``name value`` lines
METRICS = r"""
first() { for f; do if [ -r "$f" ]; then head -n 1 "$f"; return; fi; done; }
c=/sys/fs/cgroup
echo memory_bytes $(first $c/memory.current $c/memory/memory.usage_in_bytes)
echo pids $(first $c/pids.current $c/pids/pids.current)
echo cpu_usec $(first $c/cpu.stat | while read -r _ n; do echo "$n"; done)
echo cpu_nsec $(first $c/cpuacct/cpuacct.usage $c/cpu,cpuacct/cpuacct.usage)
awk 'NR > 2 && $1 != "lo:" { i += $2; o += $10 }
  END { print "network_in_bytes " i+0; print "network_out_bytes " o+0 }' /proc/net/dev
echo disk_bytes $(timeout 5 du -s -B1 -- "$1" 2>/dev/null | cut -f1)
"""
