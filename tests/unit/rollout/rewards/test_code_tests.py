"""Programs in the sandbox."""

import struct

import pytest

from services.rollout.rewards import seccomp
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


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_ends_inside_it(machine: str) -> None:
    code = list(struct.iter_unpack("HBBI", seccomp.build_filter(machine)))
    for place, (operation, if_true, if_false, _) in enumerate(code):
        if operation & 0x07 == 0x05:
            assert place + 1 + max(if_true, if_false) < len(code)
    denied = [place for place, item in enumerate(code) if item[0] == 0x15][1:]
    assert all(place + 1 + code[place][1] == len(code) - 1 for place in denied)
