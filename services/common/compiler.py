"""The compilers that a host needs: C for kernels of GPUs, C++ for torch.compile on CPUs."""

import os
import shutil


def missing_compiler() -> str:
    """What to do where there is no C compiler; empty where one is found.

    Triton, whose kernels torch and the weight plane use, has it make a launcher for each of them at run time.
    It takes ``CC``, else gcc or clang.
    """
    compiler = os.environ.get("CC")
    if shutil.which(compiler) if compiler else shutil.which("gcc") or shutil.which("clang"):
        return ""
    found = f"CC is {compiler!r}, which is no program here" if compiler else "none was found"
    return (
        f"kernels for GPUs need a C compiler, but {found}; install gcc or clang and the headers of "
        "Python, or set CC"
    )


def missing_cxx_compiler() -> str:
    """Return what to do if there is no C++ compiler; empty if one is found.

    torch.compile makes C++ of layers that run on a CPU. It takes ``CXX``, else g++.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return ""
    return (
        f"on a CPU torch.compile needs a C++ compiler, but {compiler!r} is no program here; install g++, set "
        "CXX, or set trainer.compile to false"
    )
