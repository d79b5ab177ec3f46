"""Sandboxes of episodes with bubblewrap: commands, limits and the service."""

import asyncio
import inspect
import os
import shlex
import signal
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from services.common.runspec.rollout import SandboxSpec
from services.extras.agents.remote_sandbox import RemoteSandbox, sandbox_argument
from services.extras.bubblewrap import bubblewrap, cgroup
from services.rollout.failures import CallError
from services.rollout.sandbox import service as sandbox_service
from services.rollout.sandbox.base import SandboxError
from services.rollout.sandbox.pool import SandboxPool
from services.rollout.sandbox.service import SandboxService

pytestmark = pytest.mark.skipif(not bubblewrap.is_usable(), reason="needs bubblewrap")
SMALL = {"memory_bytes": 128 << 20, "disk_bytes": 4 << 20, "max_processes": 8}


@asynccontextmanager
async def sandbox(row=None, **spec):
    async with SandboxPool(SandboxSpec(**SMALL | spec)).open(row or {}) as opened:
        yield opened


async def test_commands_share_files_and_processes_until_the_episode_ends() -> None:
    async with sandbox() as box:
        assert (await box.run("pwd; echo one > file; (sleep 60 &) ; echo $((6*7)) >&2")).text == (
            "/sandbox\n42\n"
        )
        # A process is listed as sleep only after the shell's fork has called exec.
        result = await box.run("cat file; until ps -e -o comm= | grep sleep; do :; done; exit 3")
        assert (result.text, result.exit_status, result.limit) == ("one\nsleep\n", 3, "")
        assert (await box.run("cat", stdin=b"given")).text == "given"
        assert (await box.run("true \0")).exit_status == 126
        assert (await box.run("kill -9 $$")).exit_status == 128 + signal.SIGKILL
        assert box.measured["sandbox_commands"] == 5


async def test_files_and_snapshots_keep_every_byte() -> None:
    content = bytes(range(256)) * 99
    async with sandbox() as box:
        await box.write("deep/it's a file", content)
        assert await box.read("/sandbox/deep/it's a file") == content
        snapshot = await box.snapshot()
        await box.run("rm -r deep; touch other")
        await box.restore(snapshot)
        assert (await box.run("ls")).text == "deep\n"
        assert await box.read("deep/it's a file") == content
        with pytest.raises(SandboxError, match="No such file"):
            await box.read("missing")
        with pytest.raises(SandboxError, match="snapshot-1"):
            await box.restore("snapshot-9")


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("sleep 60", "time"),
        ("setsid sh -c 'while :; do :; done' & sleep 60", "time"),
        ("for i in $(seq 20); do sleep 60 & done; wait", "processes"),
        (
            f"for i in 1 2 3; do {sys.executable} -S -c 'x = bytes(range(256)) * 250000; import time;"
            "time.sleep(60)' & done; wait",
            "memory",
        ),
    ],
)
async def test_a_limit_kills_the_command_and_the_sandbox_goes_on(command: str, limit: str) -> None:
    timeout_s = 0.5 if limit == "time" else 30
    async with sandbox() as box:
        result = await box.run(command, timeout_s=timeout_s)
        assert (result.limit, result.exit_status) == (limit, 137)
        processes = await box.run("ps -e -o stat=,comm= | grep -v ^Z | grep -c sleep")
        assert processes.text == "0\n"


FORKS = """
import os, time
forks = os.open("forks", os.O_CREAT | os.O_WRONLY)
for _ in range(3000):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os.write(forks, b".")
"""


@pytest.mark.skipif(
    os.geteuid() == 0 and "pids" not in cgroup.parent_cgroups(),
    reason="needs cgroups: nothing else limits the processes of root",
)
async def test_the_kernel_bounds_processes_until_the_limit_stops_them() -> None:
    async with sandbox() as box:
        await box.run(f"{sys.executable} -S -c {shlex.quote(FORKS)}")
        # The forks occupy the kernel's process limit, but the next command has its own.
        assert (await box.run("echo on | cat")).text == "on\n"
        assert 8 <= len(await box.read("forks")) <= 8 + 256
        # Processes of a fork bomb exit if they cannot fork, possibly before the limit kills them.
        assert (await box.run("f(){ f|f& };f; sleep 60", timeout_s=2)).exit_status in (2, 137)
        assert (await box.run("echo on")).text == "on\n"


async def test_memory_disk_and_output_are_bounded() -> None:
    async with sandbox(output_bytes=1000) as box:
        big = await box.run(f"{sys.executable} -S -c 'x = bytes(1 << 30)'")
        assert "MemoryError" in big.text
        full = await box.run(
            "head -c 10000000 /dev/zero > big; head -c 10000000 /dev/zero > /tmp/b"
        )
        assert full.exit_status != 0
        assert int((await box.run("du -sk . | cut -f 1")).text) <= 4 << 10
        long = await box.run("yes | head -c 100000")
        assert (len(long.output), long.is_truncated, long.exit_status) == (1000, True, 0)


async def test_nothing_of_the_host_is_visible(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    async with sandbox() as box:
        for command in (
            f"cat {tmp_path}/secret",
            "cat /etc/passwd",
            f"cat {Path.cwd()}/pyproject.toml",
            f"{sys.executable} -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 1)'",
            f"{sys.executable} -c 'import os; os.kill({os.getpid()}, 0)'",
            "mount -t tmpfs none /usr",
            "touch /usr/mine",
        ):
            assert (await box.run(command)).exit_status != 0, command


async def test_settings_of_the_kernel_cannot_be_written() -> None:
    async with sandbox() as box:
        for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory"):
            if (await box.run(f"test -e {path}")).exit_status == 0:
                same = await box.run(f'value=$(cat {path}) && echo "$value" > {path}')
                assert same.exit_status != 0, path


async def test_memory_that_no_process_maps_is_bounded_too() -> None:
    megabyte = "head -c 1000000 /dev/zero"
    async with sandbox() as box:
        for folder in ("", "/dev", "/etc", "/root"):
            assert (await box.run(f"{megabyte} > {folder}/x")).exit_status != 0, folder
        for folder in ("/tmp", "/dev/shm"):
            filled = await box.run(
                f"for i in 1 2 3 4 5; do {megabyte} > {folder}/$i || exit 9; done"
            )
            assert filled.exit_status == 9, folder
        for call in (
            "os.memfd_create('x')",
            "(_ for _ in ()).throw(OSError) if libc.shmget(0, 4096, 0o1600) < 0 else None",
            "(_ for _ in ()).throw(OSError) if libc.unshare(0x10000000) < 0 else None",
            "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.socket()",
            "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        ):
            program = f"import ctypes, os, socket; libc = ctypes.CDLL(None); {call}"
            result = await box.run(f'{sys.executable} -c "{program}"')
            assert "Error" in result.text, (call, result.text)


_FILL = """
while True:
    for file in made():
        files.append(file)
        try:
            while True:
                os.write(file.fileno() if hasattr(file, 'fileno') else file, b'x' * 32768)
        except OSError:
            pass
"""
_PREPARE = """
import ctypes, fcntl, os, resource, select, socket, sys, time
files = []
def of_pair(kind):
    pair = socket.socketpair(socket.AF_UNIX, kind)
    for one in pair:
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    return pair
def pipe():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    files.append(reader)
    return [writer]
"""
_PAGE_TABLES = """
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, *[ctypes.c_int] * 2, ctypes.c_long]
def fill():
    for index in range(12_000):
        address = libc.mmap((1 << 44) + (index << 30), 4096, 1, 0x32, -1, 0)
        ctypes.c_char.from_address(address).value
"""
HOARDS = {
    "stream": f"{_PREPARE}made = lambda: of_pair(socket.SOCK_STREAM){_FILL}",
    "datagram": f"{_PREPARE}made = lambda: of_pair(socket.SOCK_DGRAM){_FILL}",
    "in flight": f"""{_PREPARE}
while True:
    carrier, _ = pair = of_pair(socket.SOCK_STREAM)
    files.append(pair)
    for _ in range(100):
        inner = of_pair(socket.SOCK_STREAM)
        try:
            while True:
                inner[0].send(b'x' * 32768)
        except OSError:
            pass
        socket.send_fds(carrier, [b'x'], [one.fileno() for one in inner])
        for one in inner:
            one.close()
""",
    "page tables": f"{_PREPARE}{_PAGE_TABLES}for _ in range(6): os.fork() or (fill(), time.sleep(60))\n"
    "time.sleep(60)",
    "epoll": f"""{_PREPARE}
events = [os.eventfd(0) for _ in range(500)]
for _ in range(6):
    os.fork()
for _ in range(500):
    files.append(select.epoll())
    for event in events:
        files[-1].register(event, 1)
time.sleep(60)
""",
    "locks": f"""{_PREPARE}
for index in range(64):
    file = open('/tmp/' + str(index), 'w')
    files.append(file)
    for byte in range(500):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * byte)
time.sleep(60)
""",
}


@pytest.mark.skipif("memory" not in cgroup.parent_cgroups(), reason="needs memory cgroups")
@pytest.mark.parametrize("hoard", HOARDS)
async def test_memory_of_the_kernel_counts_as_the_commands(hoard: str) -> None:
    async with sandbox(memory_bytes=64 << 20, disk_bytes=1 << 20, max_processes=128) as box:
        result = await box.run(f"{sys.executable} -S -c {shlex.quote(HOARDS[hoard])}")
        assert (result.limit, result.exit_status) == ("memory", 137), result.text
        # The kernel may have killed the sandbox with the command.
        with suppress(SandboxError):
            assert (await box.run("echo on")).text == "on\n"


@pytest.mark.parametrize("has_cgroups", [True, False])
async def test_pipes_hold_little(has_cgroups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_cgroups:
        monkeypatch.setattr(cgroup, "parent_cgroups", dict)
    program = f"{_PREPARE}made = pipe\nfor _ in range(6): os.fork(){_FILL}"
    async with sandbox(memory_bytes=64 << 20, max_processes=128) as box:
        result = await box.run(f"{sys.executable} -S -c {shlex.quote(program)}")
        assert (result.limit, result.exit_status) == ("memory", 137), result.text


async def test_a_command_has_no_sockets_where_no_cgroup_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "parent_cgroups", dict)
    for loopback in (False, True):
        async with sandbox(loopback=loopback) as box:
            for program in ("socket.socketpair()", "socket.socket(socket.AF_UNIX)"):
                result = await box.run(f"{sys.executable} -c 'import socket; {program}'")
                assert (result.exit_status == 0) is loopback


STOP_CHECKS = """
import ctypes, os, signal, time
libc = ctypes.CDLL(None)
for process in (1, 2):
    if TRACES:
        libc.ptrace(16, process, 0, 0)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        try:
            if process not in (os.getpid(), os.getppid()):
                os.kill(process, number)
        except OSError:
            pass
for _ in range(4):
    if os.fork() == 0:
        content = bytes(range(256)) * 150_000
        time.sleep(60)
"""


@pytest.mark.parametrize("has_cgroups", [True, False])
async def test_commands_cannot_stop_what_checks_their_limits(
    has_cgroups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_cgroups:
        monkeypatch.setattr(cgroup, "parent_cgroups", dict)
    # Debuggers work where the kernel limits the memory.
    program = STOP_CHECKS.replace("TRACES", str(not has_cgroups))
    async with sandbox(memory_bytes=128 << 20) as box:
        result = await box.run(f"{sys.executable} -S -c {shlex.quote(program)}; sleep 60")
        assert (result.limit, result.exit_status) == ("memory", 137), result.text
        assert (await box.run("echo on")).text == "on\n"


CALLS_ON_INIT = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = dict(ptrace=(101, 117), pidfd_open=(434, 434), pidfd_getfd=(438, 438), process_vm_writev=(311, 271))
NUMBERS |= dict(prlimit64=(302, 261), sched_setaffinity=(203, 122), sched_setscheduler=(144, 119))
NUMBERS |= dict(sched_setparam=(142, 118), sched_setattr=(314, 274), setpriority=(141, 140))

def call(name, *arguments):
    number = NUMBERS[name][os.uname().machine == "aarch64"]
    if libc.syscall(number, *arguments) >= 0:
        print("allowed:", name, arguments)

descriptor = os.pidfd_open(1)
call("ptrace", 16, 1, 0, 0)
call("pidfd_getfd", descriptor, 0, 0)
text = ctypes.create_string_buffer(b"text")
vector = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(text), 4))
call("process_vm_writev", 1, vector, 1, vector, 1, 0)
zero = ctypes.create_string_buffer(64)
for limit in range(16):
    call("prlimit64", 1, limit, zero, None)
call("sched_setaffinity", 1, 8, ctypes.create_string_buffer(b"\\1" + bytes(7)))
call("sched_setscheduler", 1, 5, zero)
call("sched_setparam", 1, zero)
call("sched_setattr", 1, ctypes.create_string_buffer(struct.pack("IIQiIQQQ", 48, 5, *[0] * 6)), 0)
for kind, who in ((0, 1), (1, 0), (1, 1), (2, 0)):
    call("setpriority", kind, who, 19)
for name in ("fd/0", "fd/1", "mem", "maps", "root", "environ"):
    try:
        open("/proc/1/" + name, "rb").close()
        print("opened:", name)
    except OSError:
        pass
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
os.nice(5)
print("the end")
"""


@pytest.mark.parametrize("has_cgroups", [True, False])
async def test_commands_reach_nothing_of_the_process_that_answers_for_them(
    has_cgroups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_cgroups:
        monkeypatch.setattr(cgroup, "parent_cgroups", dict)
    async with sandbox() as box:
        await box.write("calls.py", CALLS_ON_INIT.encode())
        result = await box.run(
            f"{sys.executable} -S calls.py; renice -n 5 $$ > /dev/null && echo nice"
        )
        assert (result.limit, result.text) == ("", "the end\nnice\n")
        forged = "printf '0 0 - 7\\nforged\\n' > /proc/1/fd/1"
        assert "forged" not in (await box.run(f"sh -c {shlex.quote(forged)} 2> /dev/null")).text
        assert (await box.run("echo on")).text == "on\n"


async def test_signals_do_not_end_the_process_that_answers_for_commands() -> None:
    async with sandbox() as box:
        signals = "for number in $(seq 1 31); do kill -$number 1; done 2> /dev/null; echo sent"
        assert (await box.run(signals)).text == "sent\n"
        assert (await box.run("echo on")).text == "on\n"


async def test_debuggers_trace_a_commands_own_processes() -> None:
    program = (
        "import ctypes, os; print(ctypes.CDLL(None).ptrace(16, int(os.environ['OTHER']), 0, 0))"
    )
    async with sandbox() as box:
        command = f"sleep 9 & OTHER=$! {sys.executable} -S -c {shlex.quote(program)}; kill -9 $!"
        assert (await box.run(command)).text == ("0\n" if cgroup.parent_cgroups() else "-1\n")


async def test_queues_of_events_are_refused_where_no_cgroup_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "parent_cgroups", dict)
    async with sandbox() as box:
        for function in ("inotify_init()", "inotify_init1(0)", "fanotify_init(512, 0)"):
            program = f"import ctypes; print(ctypes.CDLL(None).{function})"
            assert (await box.run(f"{sys.executable} -c '{program}'")).text == "-1\n"


async def test_orphans_are_reaped() -> None:
    async with sandbox() as box:
        for _ in range(3):
            # Ended orphans that were kept would exceed the limit of processes.
            await box.run("for i in 1 2 3 4 5; do setsid true & done; sleep 0.3")
        alive = await box.run("for i in 1 2 3 4 5; do setsid true & done; sleep 1; ps -e -o stat=")
        assert "Z" not in alive.text


async def test_processes_talk_over_the_loopback_if_the_specification_says_so() -> None:
    program = (
        "import socket; server = socket.create_server(('127.0.0.1', 0)); "
        "socket.create_connection(server.getsockname()).send(b'on'); "
        "print(server.accept()[0].recv(9))"
    )
    for loopback in (False, True):
        async with sandbox(loopback=loopback) as box:
            result = await box.run(f'{sys.executable} -c "{program}"')
            assert (result.text == "b'on'\n") is loopback
            asynchronous = await box.run(
                f"{sys.executable} -c 'import asyncio; asyncio.run(asyncio.sleep(0))'"
            )
            assert asynchronous.exit_status == 0


async def test_empty_files_count() -> None:
    create = "import itertools\nfor i in itertools.count(): open(f'/tmp/{i}', 'w').close()"
    async with sandbox(memory_bytes=1 << 30) as box:
        result = await box.run(f"{sys.executable} -S -c {shlex.quote(create)}")
        assert (result.limit, result.exit_status) == ("files", 137)
        assert (await box.run("ls -f /tmp | wc -l; rm -r /tmp/*[0-4]; echo on")).text.endswith(
            "on\n"
        )


async def test_limits_hold_between_two_commands() -> None:
    async with sandbox() as box:
        await box.run("sleep 0.3; for i in $(seq 20); do sleep 60 & done")
        deadline = asyncio.get_running_loop().time() + 20
        while len(psutil.Process(box._sandbox._process.pid).children(recursive=True)) > 2:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.05)
        assert (await box.run("echo on")).text == "on\n"


async def test_a_host_that_forbids_proc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "_try_out", lambda *options: "no" if options else "")
    with pytest.raises(ValueError, match=r"rollout\.sandbox\.kind"):
        await SandboxPool(SandboxSpec(**SMALL)).prepare()


async def test_an_image_is_a_folder_and_a_row_may_name_one_inside(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    async with sandbox(image=str(tmp_path / "one")) as box:
        assert await box.read("name") == b"one"
    rows = {"image": str(tmp_path), "image_column": "task"}
    async with sandbox({"task": "two"}, **rows) as box:
        assert await box.read("name") == b"two"
    for task, problem in (
        ("../..", "outside"),
        ("a\0b", "outside"),
        ("three", "folder"),
        (None, "image_column"),
    ):
        with pytest.raises(CallError, match=problem):
            async with sandbox({"task": task}, **rows):
                pass


async def test_at_most_max_running_sandboxes_run_and_the_others_wait() -> None:
    pool = SandboxPool(SandboxSpec(**SMALL, max_running=2))
    running = most = 0
    pairs = asyncio.Barrier(2)

    async def episode() -> None:
        nonlocal running, most
        async with pool.open({}):
            running += 1
            most = max(most, running)
            await pairs.wait()
            running -= 1

    await asyncio.gather(*[episode() for _ in range(6)])
    assert most == 2


async def test_a_sandbox_that_dies_is_reported_and_the_next_one_starts() -> None:
    pool = SandboxPool(SandboxSpec(**SMALL, max_running=1))
    async with pool.open({}) as box:
        first = psutil.Process(box._sandbox._process.pid).children()[0]
        first.kill()
        first.wait(10)
        with pytest.raises(SandboxError, match="died"):
            await box.run("true")
        with pytest.raises(SandboxError, match="ended"):
            await box.run("true")
    async with pool.open({}) as box:
        assert (await box.run("echo on")).text == "on\n"


async def test_another_process_uses_the_sandbox_with_its_key() -> None:
    service = SandboxService(SandboxPool(SandboxSpec(**SMALL)))
    async with service.serving("127.0.0.1:0", host="127.0.0.1"):
        async with service.open({}) as box:
            remote = RemoteSandbox(box.access)
            await remote.write("a", "text")
            assert await remote.read("a") == b"text"
            result = await remote.run("cat a -; exit 2", stdin="more", timeout_s=5)
            assert (result.text, result.exit_status) == ("textmore", 2)
            await remote.restore(await remote.snapshot())
            with pytest.raises(SandboxError, match="No such file"):
                await remote.read("b")

            def plain(sandbox: object) -> None: ...

            blocking = sandbox_argument(box.access, plain)
            assert not inspect.iscoroutinefunction(plain)
            assert (await asyncio.to_thread(blocking.run, "cat a")).text == "text"
            async with httpx.AsyncClient() as client:
                for key, body, status in (
                    ("wrong", "{}", 401),
                    (box.access["key"], "{}", 400),
                    (box.access["key"], "[]", 400),
                    (box.access["key"], '{"command": 3}', 400),
                ):
                    answer = await client.post(
                        f"{box.access['url']}/run",
                        headers={"Authorization": f"Bearer {key}"},
                        content=body,
                    )
                    assert answer.status_code == status, body
        with pytest.raises(SandboxError, match="key"):
            await remote.run("true")


async def test_connections_of_strangers_end_none_of_an_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox_service, "MAX_UNAUTHENTICATED_EPISODES", 2)
    service = SandboxService(SandboxPool(SandboxSpec(**SMALL)))
    async with (
        service.serving("127.0.0.1:0", host="127.0.0.1"),
        service.open({}) as box,
        AsyncExitStack() as strangers,
    ):
        request = (
            f"GET /v1/file?path=missing HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {box.access['key']}\r\n\r\n"
        ).encode()
        port = int(box.access["url"].rpartition(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        strangers.callback(writer.close)
        for _ in range(2):
            writer.write(request)
            assert b"409" in await reader.readline()
            while await reader.readline() != b"\r\n":
                pass
            await reader.readuntil(b"}")
            for _ in range(3):
                _, other = await asyncio.open_connection("127.0.0.1", port)
                strangers.callback(other.close)


KILLED = """
import asyncio
from services.common.runspec.rollout import SandboxSpec
from services.rollout.sandbox.pool import SandboxPool

async def main():
    pool = SandboxPool(SandboxSpec())
    async with pool.open({}) as box:
        await box.run("setsid sleep 1234.5 & setsid sh -c 'trap : TERM HUP INT; sleep 1234.5' & echo")
        print("ready", flush=True)
        await box.run("sleep 1234.5")

asyncio.run(main())
"""


def test_no_process_is_left_after_the_rollout_was_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    inside = psutil.Process(process.pid).children(recursive=True)
    assert (
        len(inside) >= 4
    )  # bubblewrap, its first process and both commands, whose sleep may not have begun
    process.kill()
    process.wait(10)
    _, alive = psutil.wait_procs(inside, timeout=20)
    assert not alive


@pytest.mark.skipif(not cgroup.parent_cgroups(), reason="needs cgroups")
async def test_a_sandbox_has_a_cgroup_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_UNLOCKED_S", 0.0)
    mine = f"slipstream-sandbox-{os.getpid()}-*"
    for parent in set(cgroup.parent_cgroups().values()):
        async with sandbox() as box:
            (folder,) = parent.glob(mine)
            assert str(box._sandbox._first) in (folder / "cgroup.procs").read_text().split()
            cgroup.remove_left(parent)
            assert folder.exists()
        assert not [*parent.glob(mine)]


@pytest.mark.skipif(not cgroup.parent_cgroups(), reason="needs cgroups")
def test_the_cgroup_of_a_killed_rollout_is_removed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_UNLOCKED_S", 0.0)
    parents = set(cgroup.parent_cgroups().values())
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    inside = psutil.Process(process.pid).children(recursive=True)
    mine = f"slipstream-sandbox-{process.pid}-*"
    assert all(len([*parent.glob(mine)]) == 1 for parent in parents)
    process.kill()
    process.wait(10)
    psutil.wait_procs(inside, timeout=20)
    for parent in parents:
        cgroup.remove_left(parent)
        assert not [*parent.glob(mine)]


@pytest.mark.parametrize(
    ("mounts", "memberships", "folder"),
    [
        (
            "36 25 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            "37 25 0:32 / /sys/fs/cgroup/pids rw,nosuid shared:9 - cgroup cgroup rw,pids\n"
            "38 25 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
            "8:pids:/a/b\n1:cpu,cpuacct:/\n0::/c",
            "/sys/fs/cgroup/pids/a/b",
        ),
        (
            "37 25 0:32 /docker/x /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids",
            "8:pids:/docker/x/y\n0::/",
            "/sys/fs/cgroup/pids/y",
        ),
        (
            "29 23 0:26 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate",
            "0::/user.slice/session-1.scope",
            "/sys/fs/cgroup/user.slice/session-1.scope",
        ),
    ],
)
def test_the_own_cgroup_is_found_in_both_versions(
    mounts: str, memberships: str, folder: str
) -> None:
    assert cgroup.own_cgroup(mounts, memberships, "pids") == Path(folder)
