"""Tests of the seccomp filter of system calls."""

import re
import struct
from functools import partial
from pathlib import Path

import pytest

from services.extras.bubblewrap import seccomp, system_calls
from services.extras.bubblewrap.system_calls import (
    ALLOWED,
    ARGUMENTS,
    CHECKED,
    CLONE3,
    MACHINES,
    REFUSED_IN_SANDBOXES,
    REFUSED_ON_INIT,
    REFUSED_WITHOUT_CGROUP,
    SOCKETS,
)

HEADERS = {
    "x86_64": [
        Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        Path("/usr/include/asm/unistd_64.h"),
        Path("/usr/x86_64-linux-gnu/include/asm/unistd_64.h"),
    ],
    "aarch64": [
        Path("/usr/include/asm-generic/unistd.h"),
        Path("/usr/aarch64-linux-gnu/include/asm-generic/unistd.h"),
    ],
}
ALLOW, KILL, DENY, UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def numbers_of_the_kernel(machine: str) -> dict[str, int]:
    header = next((path for path in HEADERS[machine] if path.exists()), None)
    if header is None:
        pytest.skip(f"needs the kernel's headers for {machine} (Debian: linux-libc-dev)")
    definitions = re.findall(
        r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.MULTILINE
    )
    numbers = {name: int(number) for name, number in definitions}
    # The generic header uses the 32-bit name fstatat.
    return {"newfstatat": numbers.get("fstatat", -1), **numbers}


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_is_the_kernels(machine: str) -> None:
    kernel = numbers_of_the_kernel(machine)
    column = MACHINES.index(machine)
    tables = ALLOWED | CHECKED | REFUSED_IN_SANDBOXES | REFUSED_WITHOUT_CGROUP | SOCKETS
    tables |= {name: numbers for name, (numbers, _) in REFUSED_ON_INIT.items()}
    ours = {name: numbers[column] for name, numbers in tables.items()}
    assert ours == {name: kernel.get(name) for name in ours}
    assert kernel["clone3"] == CLONE3
    assert set(CHECKED) == {*ARGUMENTS, "clone"}
    assert not set(ALLOWED) & set(CHECKED)


@pytest.mark.parametrize("machine", MACHINES)
def test_references_to_another_process_are_rejected(machine: str) -> None:
    kernel = numbers_of_the_kernel(machine)
    others = [
        name
        for name in kernel
        if name.startswith(("process_", "pidfd_", "ioprio_", "sched_set", "mq_", "io_uring", "bpf"))
    ]
    for name in (
        *others,
        *(
            "kill",
            "tkill",
            "tgkill",
            "rt_sigqueueinfo",
            "rt_tgsigqueueinfo",
            "ptrace",
            "setpriority",
        ),
        *(
            "socket",
            "execve",
            "execveat",
            "kcmp",
            "migrate_pages",
            "move_pages",
            "unshare",
            "setns",
        ),
    ):
        assert answer(machine, kernel[name]) == DENY, name


def answer(
    machine: str,
    number: int,
    *arguments: int,
    architecture: int | None = None,
    build=seccomp.build_filter,
) -> int:
    """Interprets the filter's instructions and returns the kernel's action for a system call."""
    data = struct.pack(
        "IIQ6Q",
        number,
        ARCHITECTURES[machine] if architecture is None else architecture,
        0,
        *(*arguments, *(0,) * (6 - len(arguments))),
    )
    code = list(struct.iter_unpack("HBBI", build(machine)))
    position, word = 0, 0
    while True:
        operation, if_true, if_false, operand = code[position]
        position += 1
        if operation == 0x06:
            return int(operand)
        if operation == 0x20:
            (word,) = struct.unpack_from("I", data, operand)
            continue
        holds = {0x15: word == operand, 0x25: word > operand, 0x45: bool(word & operand)}[operation]
        position += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_over_checked_calls(machine: str) -> None:
    column = MACHINES.index(machine)

    def call(name: str, *arguments: int) -> int:
        number = (ALLOWED | CHECKED)[name][column]
        assert number is not None
        return answer(machine, number, *arguments)

    assert call("read", 3) == ALLOW
    assert (call("prlimit64", 0), call("prlimit64", 4242)) == (ALLOW, DENY)
    assert (call("sched_getaffinity", 0), call("sched_getaffinity", 1)) == (ALLOW, DENY)
    assert (call("fcntl", 5, 3), call("fcntl", 5, 8), call("fcntl", 5, 10)) == (ALLOW, DENY, DENY)
    assert (call("clone", 0x10F00), call("clone", 17)) == (ALLOW, DENY)
    assert (call("exit_group", 1), call("exit_group", 137)) == (ALLOW, DENY)
    assert answer(machine, CLONE3) == UNKNOWN
    assert answer(machine, system_calls.NEWEST + 1) == UNKNOWN
    assert answer(machine, 0x40000000) == UNKNOWN
    assert answer(machine, 0, architecture=0x40000003) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_a_sandbox_has_neither_uncounted_memory_nor_new_namespaces(machine: str) -> None:
    kernel = numbers_of_the_kernel(machine)

    def call(name: str, *arguments: int, counted: bool = True, **sockets: bool) -> int:
        options = {"has_sockets": False, "has_network": False, "has_cgroup": counted, **sockets}
        build = partial(seccomp.sandbox_filter, **options)
        return answer(machine, kernel[name], *arguments, build=build)

    for name in ("inotify_init1", "fanotify_init", "ptrace", "process_vm_writev"):
        assert (call(name), call(name, counted=False)) == (ALLOW, UNKNOWN)

    assert {call(name) for name in ("memfd_create", "shmget", "unshare", "mount", "bpf")} == {
        UNKNOWN
    }
    assert {call(name) for name in ("execve", "kill", "mmap", "openat", "bind")} == {ALLOW}
    assert (call("clone", 17), call("clone", 17 | 0x10000000)) == (ALLOW, DENY)
    assert call("clone3") == UNKNOWN
    unix, tcp, mptcp, netlink, vsock = (1, 1, 0), (2, 1, 6), (2, 1, 262), (16, 3, 0), (40, 1, 0)
    for name in ("socket", "socketpair"):
        for has_sockets, has_network, allowed in (
            (False, False, set()),
            (True, False, {unix}),
            (True, True, {unix, tcp, netlink}),
        ):
            call_one = partial(call, name, has_sockets=has_sockets, has_network=has_network)
            families = (unix, tcp, mptcp, netlink, vsock)
            assert {family for family in families if call_one(*family) == ALLOW} == allowed
            assert {call_one(*family) for family in families} - {ALLOW} == {DENY}
