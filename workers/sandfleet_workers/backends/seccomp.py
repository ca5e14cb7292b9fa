"""A seccomp filter for local sandboxes, assembled by hand: system calls that nothing an agent runs needs and
that kernel exploits start from. Pure.

The classic BPF machine is small enough that a dependency would be longer than the program.
"""

from __future__ import annotations

import errno
import platform
import struct

__all__ = ["filter_program"]

_LOAD, _JUMP_EQ, _JUMP_GE, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH = 0, 4
_X32 = 0x40000000

#: name: (x86_64, aarch64)
_DENIED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_ARCHES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def filter_program(machine: str | None = None) -> bytes | None:
    """The compiled filter for ``machine`` (this one's if not given); None where the numbers are not known.

    A denied call fails with EPERM; another architecture's calling convention (32-bit, x32) ends the process,
    because there the numbers mean other calls.
    """
    known = _ARCHES.get(machine or platform.machine())
    if known is None:
        return None
    arch, column = known
    numbers = sorted(pair[column] for pair in _DENIED.values())
    program = [
        _op(_LOAD, 0, 0, _ARCH),
        _op(_JUMP_EQ, 1, 0, arch),
        _op(_RETURN, 0, 0, _KILL),
        _op(_LOAD, 0, 0, _NR),
        _op(_JUMP_GE, len(numbers) + 1, 0, _X32),
    ]
    # Each comparison jumps over those after it, over the two lines that follow them, to the refusal.
    program += [_op(_JUMP_EQ, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [_op(_RETURN, 0, 0, _ALLOW), _op(_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    return b"".join(program)


def _op(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)
