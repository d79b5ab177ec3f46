"""System calls that a sandboxed process may not make: a seccomp filter, set without privileges.

The filter denies sockets (so there is no network), new processes (threads are allowed), signals to and
inspection of other processes, memory and messages that processes share by name, namespaces, changes of
modes, owners and times of files, and io_uring, which could do things behind the filter's back. Denied calls
fail with EPERM.
"""

import ctypes
import errno
import platform
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED = {
    # socket, socketpair, kill, tkill, tgkill, ptrace, process_vm_readv, process_vm_writev,
    # pidfd_send_signal, io_uring_setup; shmget, shmat, semget, msgget, mq_open, keyctl, add_key, request_key;
    # unshare, setns; what Landlock leaves out: chmod, fchmod, fchmodat, chown, fchown, lchown, fchownat,
    # utime, utimes, utimensat, setxattr and removexattr in their forms, fchmodat2;
    # on x86_64 fork and vfork, which elsewhere are clone
    "x86_64": (
        *(41, 53, 62, 200, 234, 101, 310, 311, 424, 425),
        *(29, 30, 64, 68, 240, 250, 248, 249, 272, 308),
        *(90, 91, 268, 92, 93, 94, 260, 132, 235, 280, 188, 189, 190, 197, 198, 199, 452, 57, 58),
    ),
    "aarch64": (
        *(198, 199, 129, 130, 131, 117, 270, 271, 424, 425),
        *(194, 196, 190, 186, 180, 219, 217, 218, 97, 268),
        *(52, 53, 54, 55, 88, 5, 6, 7, 14, 15, 16, 452),
    ),
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_CLONE_THREAD = 0x00010000
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_DENY, _UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_X32_CALLS = 0x40000000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_supported() -> bool:
    """Whether this host can set the filter."""
    return platform.system() == "Linux" and platform.machine() in _ARCHITECTURES


def build_filter(machine: str) -> bytes:
    """The filter as classic BPF instructions (opcode, jumps, operand).

    Args:
        machine: ``x86_64`` or ``aarch64``.
    """
    denied = _DENIED[machine]
    # Behind the list: clone3, clone, its flags, their test, ALLOW, DENY, UNKNOWN.
    to_deny = len(denied) + 5
    code = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_AT_LEAST, to_deny, 0, _X32_CALLS),
    ]
    for place, number in enumerate(denied):
        code.append((_JUMP_EQUAL, to_deny - 1 - place, 0, number))
    code += [
        # Its flags are behind a pointer; the C library then takes clone.
        (_JUMP_EQUAL, 5, 0, _CLONE3),
        (_JUMP_EQUAL, 0, 2, _CLONE[machine]),
        (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_OFFSET),
        (_JUMP_BITS, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _UNKNOWN),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def install() -> None:
    """Set the filter for this process and its children, for ever.

    Raises:
        OSError: If the kernel does not take it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    instructions = build_filter(platform.machine())
    program = _Program(len(instructions) // 8, instructions)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if library.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "the kernel refused the seccomp filter")
