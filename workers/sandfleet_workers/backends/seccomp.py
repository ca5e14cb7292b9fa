"""A seccomp filter for sandboxes, assembled by hand: system calls that nothing an agent runs needs and that kernel
exploits start from, or that would lift a thread's quota. Pure.

The classic BPF machine is small enough that a dependency would be longer than the program.
"""

from __future__ import annotations

import errno
import platform
import struct

__all__ = ["filter_program"]

_LOAD, _JUMP_EQ, _JUMP_GE, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
#: Offsets in struct seccomp_data; of arguments the half that holds a 32-bit number.
_NR, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24
_X32 = 0x40000000

#: name: (x86_64, aarch64)
_DENIED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "file_setattr": (469, 469),
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
_IOCTL = (16, 29)
#: FS_IOC_FSSETXATTR and FS_IOC_SETFLAGS: the owner of a file could move it out of the thread's project.
_DENIED_IOCTLS = (0x401C5820, 0x40086602)
#: For other processes than the caller: whoever has its uid could end process 1 by its limits, or blind it.
_PRLIMIT = (302, 261)


def filter_program(machine: str | None = None) -> bytes | None:
    """The compiled filter for ``machine`` (this one's if not given); None where the numbers are not known.

    A denied call fails with EPERM; another architecture's calling convention (32-bit, x32) ends the process,
    because there the numbers mean other calls.
    """
    known = _ARCHES.get(machine or platform.machine())
    if known is None:
        return None
    arch, column = known
    lines: list[_Line] = [
        (_LOAD, "", "", _ARCH),
        (_JUMP_EQ, "", "kill", arch),
        (_LOAD, "", "", _NR),
        (_JUMP_GE, "refuse", "", _X32),
        *((_JUMP_EQ, "refuse", "", number) for number in sorted(pair[column] for pair in _DENIED.values())),
        (_JUMP_EQ, "ioctl", "", _IOCTL[column]),
        (_JUMP_EQ, "prlimit", "allow", _PRLIMIT[column]),
        "ioctl",
        (_LOAD, "", "", _SECOND),
        *((_JUMP_EQ, "refuse", "", request) for request in _DENIED_IOCTLS),
        (_JUMP_EQ, "allow", "allow", 0),
        "prlimit",
        (_LOAD, "", "", _FIRST),
        (_JUMP_EQ, "allow", "refuse", 0),
        "allow",
        (_RETURN, "", "", _ALLOW),
        "refuse",
        (_RETURN, "", "", _ERRNO | errno.EPERM),
        "kill",
        (_RETURN, "", "", _KILL),
    ]
    return _assembled(lines)


#: A label, or: operation, label to go to if it holds, label if not (empty: the next line), value.
_Line = str | tuple[int, str, str, int]


def _assembled(lines: list[_Line]) -> bytes:
    places: dict[str, int] = {}
    code: list[tuple[int, str, str, int]] = []
    for line in lines:
        if isinstance(line, str):
            places[line] = len(code)
        else:
            code.append(line)

    def distance(at: int, label: str) -> int:
        return places[label] - at - 1 if label else 0

    return b"".join(
        struct.pack("=HBBI", operation, distance(at, holds), distance(at, fails), value)
        for at, (operation, holds, fails, value) in enumerate(code)
    )
