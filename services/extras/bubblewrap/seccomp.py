"""System call filters for programs of ``code_tests`` and for sandboxes of episodes. They need no privileges.

The filter of programs denies every call that is not listed, with EPERM. ``system_calls.py`` has the list: a
program has files, memory, threads and time, but no network and no other processes, and cannot act on them
with signals, priorities, schedulers or limits. The filter of sandboxes refuses the calls that are listed.

libseccomp could replace the list of numbers, but its binding (pyseccomp 0.1.2, of 2021) needs the
library on every host, and refuses calls that it does not know with EPERM, for which the C library has
no fallback. bubblewrap cannot replace the filter: few containers may create user namespaces.
"""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Sequence

from services.extras.bubblewrap.system_calls import (
    ALLOWED,
    ARGUMENTS,
    CHECKED,
    CLONE3,
    MACHINES,
    NETWORK_PROTOCOLS,
    NEWEST,
    REFUSED_IN_SANDBOXES,
    REFUSED_ON_INIT,
    REFUSED_WITHOUT_CGROUP,
    SOCKETS,
    UNIX_FAMILY,
)

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_THREAD, _CLONE_NEWUSER = 0x00010000, 0x10000000
_LOAD_WORD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_DENY, _UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_ARGUMENT_BYTES = 8
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

_Instruction = tuple[int, int, int, int]
"""Opcode, number of instructions to jump over if true and if false, operand."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_supported() -> bool:
    """Returns True if this host can install the filter."""
    return sys.platform == "linux" and os.uname().machine in MACHINES


def build_filter(machine: str) -> bytes:
    """Returns the filter as classic BPF instructions.

    Args:
        machine: ``x86_64`` or ``aarch64``.
    """
    column = MACHINES.index(machine)
    code = _first_instructions(machine)
    for numbers in ALLOWED.values():
        if (number := numbers[column]) is not None:
            code += _if(_JUMP_EQUAL, number, [(_RETURN, 0, 0, _ALLOW)])
    for name, numbers in CHECKED.items():
        if (number := numbers[column]) is not None:
            code += _if(_JUMP_EQUAL, number, _checks(name))
    code.append((_RETURN, 0, 0, _DENY))
    return _packed(code)


def sandbox_filter(
    machine: str, *, has_cgroup: bool, has_sockets: bool, has_network: bool
) -> bytes:
    """Returns the filter of sandboxes as classic BPF instructions.

    Args:
        machine: ``x86_64`` or ``aarch64``.
        has_cgroup: True if a cgroup limits the memory of the sandbox.
        has_sockets: True to allow Unix sockets.
        has_network: True to allow sockets of the sandbox's own network.
    """
    column = MACHINES.index(machine)
    code = _first_instructions(machine)
    refused = REFUSED_IN_SANDBOXES | ({} if has_cgroup else REFUSED_WITHOUT_CGROUP)
    for numbers in refused.values():
        if (number := numbers[column]) is not None:
            code += _if(_JUMP_EQUAL, number, [(_RETURN, 0, 0, _UNKNOWN)])
    clone = CHECKED["clone"][column]
    assert clone is not None
    namespaces = _if(_JUMP_BITS, _CLONE_NEWUSER, [(_RETURN, 0, 0, _DENY)])
    code += _if(_JUMP_EQUAL, clone, [_load_argument(0), *namespaces, (_RETURN, 0, 0, _ALLOW)])
    for numbers, arguments in REFUSED_ON_INIT.values():
        number = numbers[column]
        assert number is not None
        refusals = [
            instruction
            for argument, values in arguments.items()
            for instruction in (_load_argument(argument), *_refusals(values))
        ]
        code += _if(_JUMP_EQUAL, number, [*refusals, (_RETURN, 0, 0, _ALLOW)])
    checks = _socket_checks(has_sockets=has_sockets, has_network=has_network)
    for numbers in SOCKETS.values():
        number = numbers[column]
        assert number is not None
        code += _if(_JUMP_EQUAL, number, checks)
    code.append((_RETURN, 0, 0, _ALLOW))
    return _packed(code)


def _socket_checks(*, has_sockets: bool, has_network: bool) -> list[_Instruction]:
    """Returns the instructions after the number of a call that creates sockets."""
    code = [_load_argument(0)]
    if has_sockets:
        code += _if(_JUMP_EQUAL, UNIX_FAMILY, [(_RETURN, 0, 0, _ALLOW)])
    for family, protocols in NETWORK_PROTOCOLS.items() if has_network else ():
        allowed = [_if(_JUMP_EQUAL, protocol, [(_RETURN, 0, 0, _ALLOW)]) for protocol in protocols]
        checks = [instruction for check in allowed for instruction in check]
        code += _if(_JUMP_EQUAL, family, [_load_argument(2), *checks, (_RETURN, 0, 0, _DENY)])
    return [*code, (_RETURN, 0, 0, _DENY)]


def install() -> None:
    """Installs the filter for this process and its children, irreversibly.

    Raises:
        OSError: If the kernel refuses it.
    """
    library = ctypes.CDLL(None, use_errno=True)
    instructions = build_filter(os.uname().machine)
    program = _Program(len(instructions) // 8, instructions)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if library.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "the kernel rejected the seccomp filter")


def _first_instructions(machine: str) -> list[_Instruction]:
    """Returns the instructions that load the number of the call and refuse unknown calls."""
    return [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        # Above NEWEST are calls that the kernel added later, and calls of the x32 ABI.
        *_if(_JUMP_ABOVE, NEWEST, [(_RETURN, 0, 0, _UNKNOWN)]),
        *_if(_JUMP_EQUAL, CLONE3, [(_RETURN, 0, 0, _UNKNOWN)]),
    ]


def _packed(code: Sequence[_Instruction]) -> bytes:
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _checks(name: str) -> list[_Instruction]:
    """Returns the instructions after a checked call's number.

    They compare only the lower half of an argument: these calls ignore the upper half.
    """
    jump, (argument, values) = (
        (_JUMP_BITS, (0, (_CLONE_THREAD,))) if name == "clone" else (_JUMP_EQUAL, ARGUMENTS[name])
    )
    allowed = [_if(jump, value, [(_RETURN, 0, 0, _ALLOW)]) for value in values]
    return [
        _load_argument(argument),
        *(instruction for check in allowed for instruction in check),
        (_RETURN, 0, 0, _DENY),
    ]


def _refusals(values: Sequence[int]) -> list[_Instruction]:
    """Returns the instructions that deny a call if the loaded argument has one of these values."""
    checks = [_if(_JUMP_EQUAL, value, [(_RETURN, 0, 0, _DENY)]) for value in values]
    return [instruction for check in checks for instruction in check]


def _load_argument(index: int) -> _Instruction:
    """Returns the instruction that loads the lower half of a call's argument."""
    return (_LOAD_WORD, 0, 0, _ARGUMENTS_OFFSET + _ARGUMENT_BYTES * index)


def _if(jump: int, operand: int, body: Sequence[_Instruction]) -> list[_Instruction]:
    """Returns the body after an instruction that jumps over it unless the condition is true."""
    return [(jump, 0, len(body), operand), *body]
