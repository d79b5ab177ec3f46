"""Programs in the sandbox."""

import struct
from pathlib import Path

import pytest

from services.rollout.rewards import landlock, seccomp
from services.rollout.rewards.code_tests import code_tests

pytestmark = pytest.mark.skipif(not seccomp.is_supported(), reason="needs Linux")

PAIRS = {"inputs": ["2", "3"], "outputs": ["4", "7"]}


def score(response: str, answer: object = "assert True", **changes: object) -> float:
    return code_tests("", response, answer, {}, **changes)  # type: ignore[arg-type]


def test_asserts_decide_over_the_last_fenced_block() -> None:
    text = "Wrong:\n```python\nf = None\n```\nRight:\n```python\ndef f(x):\n    return x + 1\n```\n"
    assert score(text, "assert f(1) == 2") == 1.0
    assert score(text, "assert f(1) == 3") == 0.0
    assert score("no code at all", "assert True") == 0.0


def test_standard_input_and_output_decide_test_by_test() -> None:
    doubled = "print(int(input()) * 2)"
    assert score(doubled, PAIRS) == 0.0
    assert score(doubled, PAIRS, partial_credit=True) == 0.5
    assert score("import sys; print(2 * int(input()) + 0 ** 0 * 0); sys.exit(0)", PAIRS) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "while True: pass",
        "import time; time.sleep(100)",
        "bytearray(10 ** 10)",
        "open('big', 'wb').write(bytes(4 << 20))",
        "import os; os.abort()",
        "raise SystemExit",
        "import subprocess; subprocess.run(['sleep', '100'])",
    ],
)
def test_a_program_that_exits_early_or_leaves_its_limits_fails(program: str) -> None:
    assert score(program, seconds=1.0) == 0.0


@pytest.mark.parametrize(
    "call",
    [
        "socket.socket()",
        "socket.socketpair()",
        "socket.create_connection(('127.0.0.1', 80))",
        "os.kill(os.getppid(), 9)",
    ],
)
def test_network_and_signals_are_denied(call: str) -> None:
    program = f"import os, socket\ntry:\n    {call}\nexcept PermissionError:\n    denied = True\n"
    assert score(program, "assert denied") == 1.0


def test_an_answer_without_tests_is_a_failure_not_a_zero() -> None:
    with pytest.raises(ValueError, match="code_tests needs an answer"):
        score("x = 1", None)


DENIED = """\
def denied(call):
    try:
        call()
    except (PermissionError, OSError) as error:
        return error.errno in (1, 13, 18)
    return False
"""


@pytest.mark.skipif(not landlock.is_supported(), reason="needs Landlock")
@pytest.mark.parametrize(
    "escape",
    [
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
        "lambda: os.posix_spawn('/bin/sh', ['sh'], {{}})",
        "lambda: subprocess.run(['/bin/cat', '{secret}'])",
        "lambda: os.setuid(1) if os.getuid() == 0 else os.setuid(0)",
        "lambda: ctypes.CDLL(None, use_errno=True).unshare(0x10000000) and fail()",
        "lambda: ctypes.CDLL(None, use_errno=True).mount(b'x', b'.', b'tmpfs', 0, None) and fail()",
        "lambda: ctypes.CDLL(None, use_errno=True).shmget(1, 1, 0o666) == -1 and fail()",
    ],
)
def test_escapes_are_denied(tmp_path: Path, escape: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    fail = "def fail():\n    raise OSError(ctypes.get_errno(), '')\n"
    program = f"import ctypes, os, subprocess\n{fail}{DENIED}"
    call = escape.format(secret=secret, folder=tmp_path)
    assert score(program, f"assert denied({call})") == 1.0
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


def test_without_landlock_programs_run_only_where_that_is_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(landlock, "is_supported", lambda: False)
    with pytest.raises(RuntimeError, match="reads_files"):
        score("x = 1")
    assert score("x = 1", reads_files=True) == 1.0


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_ends_inside_it(machine: str) -> None:
    code = list(struct.iter_unpack("HBBI", seccomp.build_filter(machine)))
    for place, (operation, if_true, if_false, _) in enumerate(code):
        if operation & 0x07 == 0x05:
            assert place + 1 + max(if_true, if_false) < len(code)
    allow, deny, unknown = range(len(code) - 3, len(code))
    listed = [place for place, item in enumerate(code) if item[0] == 0x15][1:]
    *denied, clone3, clone = [place + 1 + code[place][1] for place in listed]
    assert set(denied) == {deny}
    assert (clone3, code[clone][0]) == (unknown, 0x20)
    assert listed[-1] + 1 + code[listed[-1]][2] == allow
