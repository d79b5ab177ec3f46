"""Tests of rewards that run programs in the sandbox."""

import os
import resource
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from services.extras.bubblewrap import bubblewrap, confine, seccomp
from services.extras.code_tests import programs
from services.extras.code_tests.programs import Limits, run_python
from services.extras.code_tests.reward import code_tests

pytestmark = pytest.mark.skipif(not seccomp.is_supported(), reason="needs Linux")


@pytest.fixture(params=["bubblewrap", "alone"], autouse=True)
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test once with bubblewrap and once only with Slipstream's own confinement."""
    if request.param == "alone":
        monkeypatch.setattr(bubblewrap, "is_usable", lambda: False)
    elif not bubblewrap.is_usable():
        pytest.skip("needs bubblewrap")
    return str(request.param)


PAIRS = {"inputs": ["2", "3"], "outputs": ["4", "7"]}


def score(response: str, answer: object = "assert begun", **changes: object) -> float:
    if answer == "assert begun":
        response = f"begun = True\n{response}"
    return code_tests("", response, answer, {}, **changes)  # type: ignore[arg-type]


def printed(*parts: str) -> str | None:
    """Returns the output of a program, or None if it fails."""
    return run_python(parts, "", Limits(seconds=20, memory_bytes=1 << 29))


def test_no_other_folder_is_writable() -> None:
    folders = ["/", "/dev/shm", "/etc", "/root"]
    program = f"""\
import os
for folder in {folders}:
    try:
        os.close(os.open(folder + '/slipstream-x', os.O_CREAT | os.O_WRONLY))
    except OSError:
        continue
    print(folder)
"""
    try:
        assert printed(program) == ""
    finally:
        for folder in folders:
            Path(f"{folder}/slipstream-x").unlink(missing_ok=True)


def test_the_wall_time_begins_when_the_program_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_launcher = f"import time; time.sleep(2.5)\n{programs._LAUNCHER}"
    monkeypatch.setattr(programs, "_LAUNCHER", slow_launcher)
    limits = Limits(seconds=2, memory_bytes=1 << 29)
    assert run_python(["print(5)"], "", limits) == "5\n"
    assert run_python(["import time; time.sleep(20); print(5)"], "", limits) is None


def test_asserts_decide_over_the_last_fenced_block() -> None:
    text = "Wrong:\n```python\nf = None\n```\nRight:\n```python\ndef f(x):\n    return x + 1\n```\n"
    assert score(text, "assert f(1) == 2") == 1.0
    assert score(text, "assert f(1) == 3") == 0.0
    assert score("no code at all", "assert f(1) == 2") == 0.0


def test_standard_input_and_output_decide_test_by_test() -> None:
    doubled = "print(int(input()) * 2)"
    assert score(doubled, PAIRS) == 0.0
    assert score(doubled, PAIRS, partial_credit=True) == 0.5
    assert score("import sys; print(2 * int(input()) + 0 ** 0 * 0); sys.exit(0)", PAIRS) == 0.0


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(100)"])
def test_a_program_that_does_not_end_fails(program: str) -> None:
    assert score(program, seconds=0.5) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "bytearray(10 ** 10)",
        "open('big', 'wb').write(bytes(4 << 20))",
        "import os; os.abort()",
        "raise SystemExit",
        "import subprocess; subprocess.run(['sleep', '100'])",
    ],
)
def test_a_program_that_exits_early_or_leaves_its_limits_fails(program: str) -> None:
    assert score(program, seconds=20.0) == 0.0


WRITERS = {
    "many files": """
import itertools, threading
numbers, megabyte = itertools.count(), bytes(1 << 20)
def write():
    while True:
        with open(str(next(numbers)), "wb") as file:
            file.write(megabyte)
for _ in range(3):
    threading.Thread(target=write).start()
write()
""",
    "nested folders": """
import os, time
for _ in range(3000):
    os.mkdir("f")
    os.chdir("f")
time.sleep(100)
""",
    "an unreadable folder": """
import os, time
os.mkdir("f", 0o300)
os.mkdir("f/g")
time.sleep(100)
""",
}


@pytest.mark.parametrize("program", WRITERS.values(), ids=WRITERS)
def test_a_program_that_writes_until_its_deadline_scores_0_and_leaves_nothing(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert score(program, seconds=1.0) == 0.0
    assert [*tmp_path.iterdir()] == []
    assert [link for link in Path("/proc").glob("[0-9]*/cwd") if _is_in(link, tmp_path)] == []


def _is_in(link: Path, folder: Path) -> bool:
    try:
        return link.readlink().is_relative_to(folder)
    except OSError:
        return False


def test_all_files_of_a_program_together_are_limited() -> None:
    program = """
import time
written = 0
try:
    for number in range(50):
        with open(str(number), "wb") as file:
            written += file.write(bytes(1 << 20))
        time.sleep(0.02)
except OSError:
    pass
"""
    parts = (program, "assert written == 50 << 20", "print('all')")
    few = Limits(seconds=60.0, memory_bytes=512 << 20, disk_bytes=8 << 20)
    assert run_python(parts, "", few) is None
    assert run_python(parts, "", replace(few, disk_bytes=64 << 20)) == "all\n"


def test_network_and_signals_are_denied() -> None:
    program = """\
import os, socket
for call in (
    socket.socket,
    socket.socketpair,
    lambda: socket.create_connection(('127.0.0.1', 80)),
    lambda: os.kill(os.getppid(), 9),
):
    try:
        call()
    except PermissionError:
        print("denied")
"""
    assert printed(program) == "denied\n" * 4


def test_an_answer_without_tests_is_a_failure_not_a_zero() -> None:
    with pytest.raises(ValueError, match="code_tests needs tests"):
        score("x = 1", None)


ESCAPES = """\
import ctypes, fcntl, os, signal, subprocess, threading

def fail():
    raise OSError(ctypes.get_errno(), '')

for text in {escapes}:
    try:
        eval(text)()
    except OSError as error:
        if error.errno in {errors}:
            continue
    print(text)
"""


def test_escapes_are_denied(tmp_path: Path, isolation: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    escapes = [
        "lambda: open('{secret}').read()",
        "lambda: os.listdir('{folder}')",
        "lambda: os.listdir(os.path.expanduser('~'))",
        "lambda: open('/proc/self/environ').read()",
        "lambda: open('/proc/%d/environ' % os.getppid()).read()",
        "lambda: open('/etc/passwd').read()",
        "lambda: open('{folder}/new', 'w')",
        "lambda: os.symlink('{secret}', 'link') or open('link').read()",
        "lambda: os.link('{secret}', 'link')",
        "lambda: os.rename('{secret}', 'stolen')",
        "lambda: os.unlink('{secret}')",
        "lambda: os.chroot('.')",
        "lambda: os.chmod('{secret}', 0o777)",
        "lambda: os.utime('{secret}', (0, 0))",
        "lambda: os.setxattr('{secret}', 'user.x', b'')",
        "lambda: os.fork()",
        "lambda: signal.pthread_kill(threading.get_ident(), 9)",
        "lambda: os.memfd_create('x')",
        "lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "lambda: fcntl.fcntl(0, 10, 9)",
        "lambda: os.posix_spawn('/bin/sh', ['sh'], {{}})",
        "lambda: subprocess.run(['/bin/cat', '{secret}'])",
        "lambda: os.setuid(1) if os.getuid() == 0 else os.setuid(0)",
        "lambda: ctypes.CDLL(None, use_errno=True).unshare(0x10000000) and fail()",
        "lambda: ctypes.CDLL(None, use_errno=True).mount(b'x', b'.', b'tmpfs', 0, None) and fail()",
        "lambda: ctypes.CDLL(None, use_errno=True).shmget(1, 1, 0o666) == -1 and fail()",
    ]
    # In bubblewrap the user's files do not exist, and system files are read-only.
    errors = (1, 13, 18, 2, 30) if isolation == "bubblewrap" else (1, 13, 18)
    calls = [escape.format(secret=secret, folder=tmp_path) for escape in escapes]
    assert printed(ESCAPES.format(escapes=calls, errors=errors)) == ""
    assert secret.read_text() == "secret"


def test_ordinary_programs_are_not_hindered() -> None:
    program = """\
import collections, json, math, random, re, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
with open("notes", "w") as file:
    file.write("x")
with ThreadPoolExecutor(2) as pool:
    squares = list(pool.map(lambda x: x * x, range(4)))
"""
    assert score(program, "assert squares == [0, 1, 4, 9] and open('notes').read() == 'x'") == 1.0


def test_without_landlock_programs_run_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(confine, "has_landlock", lambda: False)
    monkeypatch.setattr(bubblewrap, "is_usable", lambda: False)
    with pytest.raises(RuntimeError, match="reads_files"):
        score("x = 1")
    assert score("x = 1", reads_files=True) == 1.0


ON_OTHERS = """\
import ctypes
call = ctypes.CDLL(None, use_errno=True).syscall
pid = {pid}
nothing = (ctypes.c_uint64 * 16)()
pair = (ctypes.c_uint64 * 2)(0, 0)
for text in {calls}:
    if eval(text) != -1 or ctypes.get_errno() != 1:
        print(text)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="has the numbers of x86_64")
def test_other_processes_of_the_user_cannot_be_touched() -> None:
    calls = [
        "call(302, pid, 0, pair, None)",  # prlimit64, RLIMIT_CPU 0
        "call(302, pid, 7, None, nothing)",
        "call(141, 0, pid, 19)",  # setpriority
        "call(140, 0, pid)",  # getpriority
        "call(144, pid, 3, nothing)",  # sched_setscheduler
        "call(142, pid, nothing)",  # sched_setparam
        "call(203, pid, 128, nothing)",  # sched_setaffinity
        "call(204, pid, 128, nothing)",  # sched_getaffinity
        "call(314, pid, nothing, 0)",  # sched_setattr
        "call(251, 1, pid, 3 << 13)",  # ioprio_set
        "call(252, 1, pid)",  # ioprio_get
        "call(434, pid, 0)",  # pidfd_open
        "call(440, 3, nothing, 1, 4, 0)",  # process_madvise
        "call(448, 3, 0)",  # process_mrelease
        "call(310, pid, nothing, 1, nothing, 1, 0)",  # process_vm_readv
        "call(62, pid, 0)",  # kill
        "call(129, pid, 9, nothing)",  # rt_sigqueueinfo
        "call(121, pid)",  # getpgid
        "call(256, pid, 0, nothing, nothing)",  # migrate_pages
        "call(312, pid, pid, 0, 0, 0)",  # kcmp
    ]
    victim = subprocess.Popen(["sleep", "100"])
    try:
        before = properties_of(victim.pid)
        assert printed(ON_OTHERS.format(pid=victim.pid, calls=calls)) == ""
        assert properties_of(victim.pid) == before
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def properties_of(pid: int) -> list[object]:
    limits = [
        resource.prlimit(pid, limit) for limit in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE)
    ]
    return [*limits, os.sched_getaffinity(pid), os.getpriority(os.PRIO_PROCESS, pid)]


@pytest.mark.parametrize("status", [137, 143])
def test_a_program_cannot_pass_for_one_that_was_killed_from_outside(status: int) -> None:
    for way in (f"sys.exit({status})", f"os._exit({status})"):
        assert score(f"import os, sys\n{way}") == 0.0


def test_bubblewrap_shows_no_other_process_and_no_file_of_the_user(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isolation != "bubblewrap":
        pytest.skip("only with bubblewrap")
    monkeypatch.setattr(confine, "has_landlock", lambda: False)
    (tmp_path / "secret").write_text("secret")
    program = "import os\nexists, pid = os.path.exists, os.getpid()"
    assert score(program, f"assert exists({str(tmp_path)!r}) is False") == 1.0
    assert score(program, "assert pid < 10 and exists('/proc/1') is False") == 1.0
    assert score(program, "assert exists('/etc/passwd') is False") == 1.0
