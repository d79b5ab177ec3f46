"""Confines this process before it runs a program that nobody trusts. Imports little: it is quick to start."""

import ctypes
import sys
from pathlib import Path

from services.rollout.rewards import landlock, seccomp

_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/bin"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/dev/urandom", "/dev/random"),
)
_DEVICES = (Path("/dev/null"), Path("/dev/zero"))
_CAPABILITY_VERSION_3 = 0x20080522


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def confine(folder: str, *, reads_files: bool) -> None:
    """Give up what a program could misuse, for ever.

    Args:
        folder: Where it may write.
        reads_files: Whether it may read what this user can read.

    Raises:
        OSError: If the kernel does not take it.
    """
    if not reads_files and landlock.is_supported():
        landlock.restrict(readable=software(), writable=[Path(folder), *_DEVICES])
    _drop_capabilities()
    seccomp.install()


def software() -> list[Path]:
    """Where Python's and the system's software lies, parents first."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    return [Path(path) for path in sorted({*prefixes, *_SYSTEM})]


def _drop_capabilities() -> None:
    """Effective, permitted and inheritable ones: root is then like anybody else."""
    library = ctypes.CDLL(None, use_errno=True)
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if library.capset(ctypes.byref(header), ctypes.byref(nothing)) != 0:
        raise OSError(ctypes.get_errno(), "the kernel did not take the privileges away")
