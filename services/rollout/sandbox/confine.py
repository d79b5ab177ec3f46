"""Confines the current process before it runs an untrusted program. Has few imports, to start quickly."""

import ctypes
import sys
from pathlib import Path

from services.common.parent import die_with_parent
from services.rollout.sandbox import landlock, seccomp

_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/bin"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/dev/urandom", "/dev/random"),
)
_DEVICES = (Path("/dev/null"), Path("/dev/zero"))
_CAPABILITY_VERSION_3 = 0x20080522


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def confine(folder: str, *, reads_files: bool) -> None:
    """Gives up privileges that a program could misuse, irreversibly.

    Args:
        reads_files: True to keep read access to all files that this user can read.

    Raises:
        OSError: If the kernel refuses.
    """
    if not reads_files and landlock.is_supported():
        landlock.restrict(readable=software(), writable=[Path(folder), *_DEVICES])
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
