"""What runs in a container without Python: POSIX shell and the tools that coreutils, findutils, grep and busybox share.

Nothing a caller says is part of a script's text. Arguments travel as arguments; those that may hold any byte are
written by `word` and read back by ``dec``, because what goes to the engine is JSON and knows no bytes. Contents come on
stdin.

Every script begins and ends with a line that carries a mark of this one run (see `exec_output.Marked`): its process
group first, so that it can be ended, and its exit status last, so that output that broke off is not taken for a whole.
Exit status 9 tells a code of ours on stderr (``!code words``), 8 what a tool said. Pure.
"""

from __future__ import annotations

import re

from sandfleet.errors import InvalidArgument

__all__ = [
    "COMMAND",
    "DISK",
    "FETCH",
    "GLOB",
    "GREP",
    "GREP_EACH",
    "KILLER",
    "KILL_ONE",
    "LIST",
    "LIST_EACH",
    "MAKE_DIR",
    "MAKE_LINK",
    "MOVE",
    "REMOVE",
    "STAT",
    "WRITE",
    "word",
]

_PLAIN = re.compile(rb"[^A-Za-z0-9/._+=,@:-]")


def word(text: str) -> str:
    """Any text (or file name that is not UTF-8) as an argument for ``dec``.

    Raises:
        InvalidArgument: It has characters that no file name can have.
    """
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidArgument("text that cannot be encoded", argument="path") from None
    return _PLAIN.sub(lambda match: b"\\0%03o" % match[0][0], raw).decode("ascii")


#: Runs a command as it is, and tells what ended it. The shell itself tells a signal from an exit status of the same
#: number: it writes the signal's name to its own stderr, which only it has here.
COMMAND = r"""
n=$1 c=$2 k=$3; shift 3
bad() { printf '%s %s\n' "$n" "$1" >&2; exit 9; }
[ -e "$c" ] || bad path_not_found
[ -d "$c" ] || bad not_directory
cd -- "$c" 2>/dev/null || bad permission_denied
case $(pwd -P)/ in /dev/shm/*) ;; /proc/*|/sys/*|/dev/*) bad invalid_argument ;; esac
b=/bin/sh
for f in /bin/bash /usr/bin/bash /usr/local/bin/bash; do [ -x "$f" ] && b=$f && break; done
printf '%s %s\n' "$n" "$$" >&2
exec 3>&1 4>&2
e=$(exec 2>&1
  case $k in
  argv) (exec "$@") >&3 2>&4 3>&- 4>&- ;;
  line) (exec "$b" -c "$1") >&3 2>&4 3>&- 4>&- ;;
  *) (exec "$b" -c 'c=; for a do c=$c$a; done; set --; unset a; eval "$c"' "$b" "$@") >&3 2>&4 3>&- 4>&- ;;
  esac
  printf '\n%s' "$?")
s=${e##*
}
w=exit
[ -n "${e%
*}" ] && [ "$s" -gt 128 ] && w=signal
printf '%s %s %s\n' "$n" "$s" "$w"
printf '%s %s %s\n' "$n" "$s" "$w" >&2
"""

#: Ends process groups, one per line of stdin. It runs beside the commands from the first one on, and ``kill`` is part
#: of the shell, so that it works when no process can be started any more.
KILLER = r"""
while read -r g; do kill -s KILL -- "-$g" 2>/dev/null || kill -s KILL "$g" 2>/dev/null; done
"""
KILL_ONE = r'kill -s KILL -- "-$1" 2>/dev/null || kill -s KILL "$1" 2>/dev/null'

_PRELUDE = r"""
set -u
export LC_ALL=C
n=$1 t=; shift
printf '%s %s\n' "$n" "$$" >&2
trap 's=$?; [ -z "$t" ] || rm -f -- "$t"; printf "\n%s %s\n" "$n" "$s" >&2' 0
die() { printf '!%s\n' "$*" >&2; exit 9; }
say() { printf '%s\n' "$1" >&2; exit 8; }
dec() { v=$(printf '%b.' "$1"); v=${v%.}; }
there() { e=$(stat -L -- "$1" 2>&1 >/dev/null) || say "$e"; }
missing() {
  e=$(stat -L -- "$1" 2>&1 >/dev/null) && return
  case $e in *"No such file or directory"*) ;; *) say "$e" ;; esac
}
regular() { [ -d "$1" ] && die is_directory; [ -f "$1" ] && return; there "$1"; die not_regular_file; }
sized() { stat -L -c %s -- "$1"; }
into() {
  [ -d "$1" ] || { there "$1"; die not_directory; }
  cd -- "$1" 2>/dev/null && [ -r . ] || die permission_denied
}
up() { d=${1%/*}; d=${d:-/}; }
parents() {
  up "$1"
  [ -d "$d" ] && return
  if [ -e "$d" ] || [ -L "$d" ]; then die not_directory; fi
  mkdir -p -- "$d" || exit 8
}
dec "$1"; p=$v; shift
"""

#: skip count limit: the size on the first line, then blocks of 64 KiB.
FETCH = (
    _PRELUDE
    + r"""
regular "$p"
[ -r "$p" ] || die permission_denied
s=$(sized "$p") || exit 8
[ "$s" -le "$3" ] || die file_too_large "$s"
printf '%s\n' "$s"
b=65536
[ "$(($1 * b))" -lt "$s" ] || exit 0
{ e=$(dd if="$p" bs=$b skip="$1" count="$2" 2>&1 >&4 4>&-); } 4>&1 || say "$e"
"""
)

#: append mode make_parents if_digest if_size length temporary: the size and, of an appended file, its digest.
WRITE = (
    _PRELUDE
    + r"""
a=$1 m=$2 mk=$3 want=$4 wsize=$5 len=$6 new=1 old=0
if [ -e "$p" ]; then
  regular "$p"
  e=$({ : >>"$p"; } 2>&1) || say "$e"
  old=$(sized "$p") || exit 8
  new=0
else
  missing "$p"
fi
if [ "$want" != - ]; then
  h=absent
  if [ $new = 0 ]; then h=$(sha256sum <"$p") || exit 8; h=${h%% *}; fi
  [ "$h" = "$want" ] || die digest_mismatch "$h"
fi
[ "$wsize" = - ] || [ "$wsize" = "$old" ] || die digest_mismatch size "$old"
if [ $new = 1 ] && [ "$mk" = 1 ]; then parents "$p"; fi
up "$p"
[ -d "$d" ] || { there "$d"; die not_directory; }
r=$p
if [ -L "$p" ]; then r=$(readlink -f -- "$p" && echo .) || die path_not_found; r=${r%?.}; fi
up "$r"
x=${d%/}/$7
take() { [ "$len" = 0 ] || head -c "$len"; }
whole() { z=$(sized "$1") || exit 8; [ "$z" = "$2" ] || die cut_short; }
if e=$({ set -C; : >"$x"; } 2>&1); then
  t=$x
  take >>"$t" || exit 8
  whole "$t" "$len"
  [ ! -d "$r" ] || die is_directory
  if [ "$a" = 1 ]; then
    cat -- "$t" >>"$r" || exit 8
  else
    if [ "$m" = - ] && [ $new = 0 ]; then m=$(stat -L -c %a -- "$r") || exit 8; fi
    [ "$m" = - ] || chmod "$m" -- "$t" || exit 8
    e=$(mv -f -- "$t" "$r" 2>&1) || { [ $new = 0 ] || say "$e"; cat -- "$t" >"$r" || exit 8; }
  fi
else
  [ $new = 0 ] || say "$e"
  if [ "$a" = 1 ]; then take >>"$r" || exit 8; else take >"$r" || exit 8; fi
  if [ "$a" = 1 ]; then whole "$r" "$((old + len))"; else whole "$r" "$len"; fi
fi
if [ "$m" != - ]; then chmod "$m" -- "$r" || exit 8; fi
z=$(sized "$r") || exit 8
h=-
if [ "$a" = 1 ] && { [ "$want" != - ] || [ "$z" -le 4194304 ]; }; then h=$(sha256sum <"$r") || exit 8; fi
printf '%s %s\n' "$z" "${h%% *}"
"""
)

#: depth limit each: see `exec_answers.entries`.
LIST = (
    _PRELUDE
    + r"""
into "$p"
find . -mindepth 1 -maxdepth "$1" -exec sh -c "$3" sh {} + | head -c "$2"
"""
)
#: A name cannot hold two slashes, so they end it, whatever else it holds.
LIST_EACH = r"""
stat -c '%f %s %Y %n//' -- "$@" 2>/dev/null
for f do
  if [ -L "$f" ]; then t=$(readlink -- "$f"; echo .); printf 'L%s\0%s\0' "$f" "${t%?.}"; fi
done
"""

#: limit tests…: names below, each with its kind before and NUL after it, but for those the tests tell.
GLOB = (
    _PRELUDE
    + r"""
into "$p"
l=$1; shift
find . -mindepth 1 \( "$@" \) -prune -o -type d -exec printf 'd%s\0' {} + -o -exec printf 'f%s\0' {} + | head -c "$l"
"""
)

#: limit large each case kind expression basic most name tests…: see `exec_answers.matches`.
GREP = (
    _PRELUDE
    + r"""
l=$1 g=$2 each=$3 i=$4 k=$5; dec "$6"; q=$v; dec "$7"; w=$v; m=$8 name=$9; shift 9
export LC_ALL=C.UTF-8
o=$i
echo x | grep -aq x 2>/dev/null && o="$o -a"
if [ "$k" = literal ]; then
  o="$o -F"
elif echo x | grep -qP x 2>/dev/null; then
  o="$o -P"
else
  [ -n "$w" ] || die no_perl
  o="$o -E" q=$w
fi
grep $o -e "$q" </dev/null >/dev/null 2>&1
[ $? -le 1 ] || die invalid_pattern
if [ -d "$p" ]; then
  into "$p"
  find . -mindepth 1 \( "$@" \) -prune -o -type f -name "$name" -size "+${g}c" -exec printf 'S%s\0' {} + -o \
    -type f -name "$name" -exec sh -c "$each" sh "$o" "$q" "$m" {} + | head -c "$l"
else
  regular "$p"
  [ -r "$p" ] || die permission_denied
  [ "$(sized "$p")" -le "$g" ] || { printf 'S%s\0' "$p"; exit 0; }
  sh -c "$each" sh "$o" "$q" "$m" "$p" | head -c "$l"
fi
"""
)
GREP_EACH = r"""
o=$1 q=$2 m=$3 nl='
'; shift 3
l=$(grep -l $o -e "$q" -- "$@"; echo .)
[ "$l" != . ] || exit 0
for f do
  case $nl$l$nl in *"$nl$f$nl"*) ;; *) continue ;; esac
  if [ "$(head -c 8192 "$f" | wc -c)" -ne "$(head -c 8192 "$f" | tr -d '\000' | wc -c)" ]; then
    printf 'B%s\0' "$f"
  else
    printf 'F%s\0' "$f"
    grep -n $o -m "$m" -e "$q" -- "$f" | tr -d '\000'
    printf '\0'
  fi
done
"""

#: follow: see `exec_answers.entry`.
STAT = (
    _PRELUDE
    + r"""
if [ "$1" = 1 ]; then stat -L -c '%f %s %Y' -- "$p" || exit 8; else stat -c '%f %s %Y' -- "$p" || exit 8; fi
if [ -L "$p" ]; then readlink -- "$p" || exit 8; printf .; fi
"""
)

#: parents exist_ok mode.
MAKE_DIR = (
    _PRELUDE
    + r"""
if [ -e "$p" ] || [ -L "$p" ]; then
  if [ "$2" = 1 ] && [ -d "$p" ]; then exit 0; fi
  die already_exists
fi
if [ "$1" = 1 ]; then mkdir -p -- "$p" || exit 8; else missing "$p"; mkdir -- "$p" || exit 8; fi
if [ "$3" != - ]; then chmod "$3" -- "$p" || exit 8; fi
"""
)

#: target overwrite temporary.
MAKE_LINK = (
    _PRELUDE
    + r"""
dec "$1"; to=$v
parents "$p"
if [ -L "$p" ] && [ "$2" = 1 ]; then
  up "$p"
  x=${d%/}/$3
  ln -s -- "$to" "$x" || exit 8
  t=$x
  mv -fT -- "$t" "$p" 2>/dev/null || { rm -f -- "$p" && mv -f -- "$t" "$p"; } || exit 8
elif [ -e "$p" ] || [ -L "$p" ]; then
  die already_exists
else
  ln -s -- "$to" "$p" || exit 8
fi
"""
)

#: recursive missing_ok dotted.
REMOVE = (
    _PRELUDE
    + r"""
if ! [ -e "$p" ] && ! [ -L "$p" ]; then
  missing "$p"
  [ "$2" = 1 ] || die path_not_found
  exit 0
fi
[ "$3" = 0 ] || die invalid_argument
if [ -L "$p" ] || ! [ -d "$p" ]; then
  rm -f -- "$p" || exit 8
elif [ "$1" = 1 ]; then
  rm -rf -- "$p" || exit 8
else
  rmdir -- "$p" || exit 8
fi
"""
)

#: to overwrite follow dotted: a rename; what lies between file systems is copied.
MOVE = (
    _PRELUDE
    + r"""
dec "$1"; to=$v
if [ "$2" = 0 ]; then if [ -e "$to" ] || [ -L "$to" ]; then die already_exists to; fi; fi
if [ -d "$to" ] && ! [ -d "$p" ]; then
  [ -e "$p" ] || [ -L "$p" ] || there "$p"
  die is_directory to
fi
[ -e "$p" ] || [ -L "$p" ] || there "$p"
parents "$to"
[ "$4" = 0 ] || die invalid_argument
if [ "$3" = 1 ] && [ "$2" = 1 ] && [ -L "$to" ]; then
  to=$(readlink -f -- "$to" && echo .) || die path_not_found to
  to=${to%?.}
fi
[ "$p" != "$to" ] || exit 0
if [ -d "$p" ] && ! [ -L "$p" ]; then
  case $to/ in "$p"/*) die invalid_argument ;; esac
  if [ -L "$to" ] || { [ -e "$to" ] && ! [ -d "$to" ]; }; then die not_directory; fi
  if [ -d "$to" ]; then rmdir -- "$to" || die already_exists to; fi
elif [ -d "$to" ] && ! [ -L "$to" ]; then
  die is_directory
fi
mv -fT -- "$p" "$to" || exit 8
"""
)

#: How much the tree at the path occupies, in KiB.
DISK = _PRELUDE + r"""du -sk -- "$p" 2>/dev/null"""
