"""Confines the current process before it runs an untrusted program. Has few imports, to start quickly.

Landlock rules restrict file access without privileges (the kernel's documentation, userspace-api/landlock).
They apply to the process and all its children and can only become stricter. A kernel has no Landlock before
5.13, or if ``lsm=`` omits it.
"""

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from services.common.parent import die_with_parent
from services.extras.bubblewrap import seccomp

_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/bin"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/dev/urandom", "/dev/random"),
)
_DEVICES = (Path("/dev/null"), Path("/dev/zero"))
_CAPABILITY_VERSION_3 = 0x20080522
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on x86_64 and aarch64
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TRUNCATE, _DEVICE_CONTROL = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE | _DEVICE_CONTROL
_PR_SET_NO_NEW_PRIVS = 38


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def confine(folder: str, *, reads_files: bool) -> None:
    """Gives up privileges that a program could misuse, irreversibly.

    Args:
        folder: Folder that the program may write to.
        reads_files: True to keep read access to all files that this user can read.

    Raises:
        OSError: If the kernel refuses.
    """
    if not reads_files and has_landlock():
        restrict_files(readable=software(), writable=[Path(folder), *_DEVICES])
    _drop_capabilities()
    die_with_parent()
    seccomp.install()


def software() -> list[Path]:
    """Lists the folders and files of Python's and the system's software, parents first."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    return [Path(path) for path in sorted({*prefixes, *_SYSTEM})]


def _drop_capabilities() -> None:
    """Drops all effective, permitted and inheritable capabilities, so that root is an ordinary user."""
    library = ctypes.CDLL(None, use_errno=True)
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if library.capset(ctypes.byref(header), ctypes.byref(nothing)) != 0:
        raise OSError(ctypes.get_errno(), "dropping privileges failed")


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi_version() -> int:
    """Returns the kernel's version of Landlock; 0 if it has none."""
    version = int(_libc().syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG))
    return max(version, 0)


def has_landlock() -> bool:
    """Returns True if this kernel supports Landlock."""
    return abi_version() > 0


def restrict_files(*, readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Denies this process and its children all files except the given ones, irreversibly.

    Args:
        readable: Files and folders that may be read and executed; missing ones are skipped.
        writable: Files and folders that may be used in any way; missing ones are skipped.

    Raises:
        OSError: If the kernel refuses.
    """
    libc = _libc()
    handled = _all_rights(abi_version())
    ruleset = _Ruleset(handled)
    rules = _checked(
        libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0)
    )
    for path, access in [*((p, _READ) for p in readable), *((p, handled) for p in writable)]:
        if path.exists():
            _allow(libc, rules, path, access if path.is_dir() else access & _OF_FILES)
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: Path, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _PathBeneath(access, descriptor)
    _checked(libc.syscall(_ADD_RULE, rules, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
    os.close(descriptor)


def _all_rights(version: int) -> int:
    """Returns all file rights of an ABI version: 13 in version 1; 2, 3 and 5 add move, truncate and ioctl."""
    return (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "the kernel rejected the Landlock rules of the sandbox")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
