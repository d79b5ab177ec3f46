"""The first cause of a worker's failure, found in logs of engines, ranks and our own processes."""

import io
import logging
import subprocess
import sys

import pytest

from services.common.telemetry.logging import configure
from services.controller.launch.failure_cause import first_cause
from services.controller.launch.launcher import WorkerExit
from services.controller.launch.worker_process import last_lines

FREE_MEMORY = (
    "ValueError: Free memory on device cuda:0 (21.3/139.8 GiB) on startup is less than desired GPU memory "
    "utilization (0.9, 125.83 GiB)."
)


def vllm_log(cause: str = FREE_MEMORY) -> str:
    head = "(EngineCore_DP0 pid=4242) "
    logged = f"{head}ERROR 11-29 00:11:22 [core.py:1100] "
    frames = [f'  File "/v/core.py", line {n}, in f' for n in range(40)]
    raised = ["Traceback (most recent call last):", *frames, cause]
    return "\n".join(
        [
            "rollout rollout-0 00:10:50 INFO    loading",
            f"{head}INFO 11-29 00:11:20 [core.py:93] Initializing a V1 LLM engine",
            f"{logged}EngineCore failed to start.",
            *(f"{logged}{line}" for line in raised),
            f"{head}Process EngineCore_DP0:",
            *(f"{head}{line}" for line in raised),
            "Traceback (most recent call last):",
            *frames,
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            "the vLLM engine did not start; see its log lines above",
        ]
    )


def test_the_cause_of_a_failed_engine_start_is_the_engines_own_exception():
    assert first_cause(vllm_log()) == FREE_MEMORY


def test_the_engine_of_sglang_is_read_too():
    log = "\n".join(
        [
            "[2025-11-29 00:11:22] Scheduler hit an exception: Traceback (most recent call last):",
            '  File "/s/scheduler.py", line 3, in run',
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "",
            "rollout rollout-0 00:11:23 ERROR   the engine ended",
            "SGLang ended; see its log lines above",
        ]
    )
    assert first_cause(log).startswith("RuntimeError: Not enough memory.")


def test_of_several_ranks_the_first_that_failed_is_named():
    log = "\n".join(
        [
            "[rank1]: Traceback (most recent call last):",
            '[rank1]:   File "t.py", line 1, in f',
            "[rank0]: Traceback (most recent call last):",
            '[rank0]:   File "t.py", line 2, in g',
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "[rank0]: RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:20001",
        ]
    )
    assert (
        first_cause(log)
        == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (
            "raise ValueError('model.path: no such folder')",
            "ValueError: model.path: no such folder",
        ),
        (
            "import sys; sys.exit('rank 1 failed: ValueError: 4 heads')",
            "rank 1 failed: ValueError: 4 heads",
        ),
        ("raise ExceptionGroup('some', [KeyError('w'), OSError('x')])", "KeyError: 'w'"),
        (
            "try:\n 1/0\nexcept ZeroDivisionError as e:\n raise ValueError('bad') from e",
            "ValueError: bad; caused by ZeroDivisionError: division by zero",
        ),
        (
            "try:\n raise OSError('full')\nexcept OSError:\n raise BrokenPipeError('pipe')",
            "OSError: full",
        ),
        (
            "from pydantic import BaseModel\nclass A(BaseModel):\n b: int\nA()",
            "1 validation error for A b",
        ),
        (
            "import nothing_of_this_name",
            "ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
    ],
)
def test_the_cause_of_a_program_that_ended_is_its_exception_or_its_last_words(program, cause):
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert cause in first_cause(result.stderr)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_that_the_worker_logged_and_survived_is_not_the_cause(log_format, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure(log_format=log_format, service="rollout")
    try:
        try:
            raise KeyError("survived")
        except KeyError:
            logging.getLogger("test").exception("request failed")
    finally:
        logging.basicConfig(force=True)
    assert (
        first_cause(f"{stream.getvalue()}the checkpoint is damaged\n")
        == "the checkpoint is damaged"
    )


def test_an_exception_of_an_hour_ago_is_not_the_cause():
    log = "\n".join(
        [
            "rollout rollout-0 10:00:00 INFO    loaded",
            "Traceback (most recent call last):",
            '  File "reward.py", line 1, in f',
            "ValueError: printed by a reward",
            "rollout rollout-0 11:00:00 INFO    working",
            "a new failure",
        ]
    )
    assert first_cause(log) == "a new failure"


def test_the_report_of_an_exit_is_one_line_with_the_cause_and_the_log():
    exit_ = WorkerExit(
        run_id="run_01",
        worker_id="rollout-0",
        code=1,
        last_lines=vllm_log(),
        log="/s/rollout-0.log",
    )
    report = exit_.report()
    assert "\n" not in report
    assert FREE_MEMORY in report
    assert "/s/rollout-0.log" in report


def test_a_killed_worker_is_reported_with_its_last_lines_and_no_cause():
    lines = "Traceback (most recent call last):\n  File\nValueError: survived\nstep 7"
    report = WorkerExit(run_id="run_01", worker_id="rollout-0", code=-9, last_lines=lines).report()
    first, *rest = report.splitlines()
    assert "signal 9" in first
    assert "slipstream logs run_01 rollout-0" in first
    assert rest == lines.splitlines()


def test_a_worker_without_a_line_is_reported_without_an_empty_end():
    report = WorkerExit(run_id="run_01", worker_id="rollout-0", code=-9, last_lines="").report()
    assert report.endswith("(log: slipstream logs run_01 rollout-0)")


def test_lines_of_an_earlier_process_of_the_worker_are_left_out(tmp_path):
    log = tmp_path / "rollout-0.log"
    log.write_text("old\n")
    begin = log.stat().st_size
    with log.open("a") as file:
        file.write("new\n")
    assert last_lines(log, 100, begin=begin) == "new"
    log.write_text("n\n")  # emptied, because it was too large
    assert last_lines(log, 100, begin=begin) == "n"


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("end", ["os._exit(0)", "os._exit(7)", "os.kill(os.getpid(), 9)"])
def test_code_of_the_user_that_ends_its_process_is_named(tmp_path, log_format, end):
    file, log = tmp_path / "my loss.py", tmp_path / "trainer.log"
    file.write_text(f"import os\n{end}\ndef f(): pass\n")
    harmless = tmp_path / "harmless.py"
    harmless.write_text("def g(): pass\n")
    program = (
        "from services.common.callables import load_callable\n"
        "from services.common.telemetry.logging import configure\n"
        f"configure(log_format={log_format!r}, service='trainer', worker='trainer-0')\n"
        f"load_callable({f'{harmless}:g'!r})\n"
        f"load_callable({f'{file}:f'!r})\n"
    )
    with log.open("wb") as output:
        code = subprocess.run(
            [sys.executable, "-c", program], stderr=output, check=False
        ).returncode
    worker_exit = WorkerExit(
        run_id="r", worker_id="trainer-0", code=code, last_lines=last_lines(log), log=str(log)
    )
    status = f"with exit code {code}" if code >= 0 else f"with signal {-code}"
    assert worker_exit.report() == (
        f"trainer-0 exited {status} while it ran '{file}:f', which must not end the process (log: {log})"
    )


def test_code_of_the_user_that_has_ended_is_not_blamed():
    log = "\n".join(
        [
            "trainer trainer-0/0 10:00:00 INFO    user code begins reference=/l.py:f",
            "trainer trainer-0/0 10:00:01 INFO    user code has ended reference=/l.py:f",
            "trainer trainer-0/0 10:00:02 INFO    serving",
        ]
    )
    worker_exit = WorkerExit(run_id="r", worker_id="trainer-0", code=3, last_lines=log)
    assert "/l.py" not in worker_exit.report().splitlines()[0]


def _blame(*lines: str, code: int = 3) -> str:
    worker_exit = WorkerExit(
        run_id="r", worker_id="trainer-0", code=code, last_lines="\n".join(lines)
    )
    return worker_exit.report().splitlines()[0]


_BEGINS = "trainer trainer-0/0 10:00:00 INFO    user code begins reference=/l.py:f"
_ENDED = "trainer trainer-0/0 10:00:01 INFO    user code has ended reference=/l.py:f"


@pytest.mark.parametrize(
    "lines",
    [
        (_BEGINS, _BEGINS, _ENDED),
        (_BEGINS, _BEGINS.replace("10:00:00", "10:07:00"), _ENDED.replace("10:00:01", "10:07:09")),
        (_BEGINS, "Traceback (most recent call last):", '  File "/s.py"', "OSError: no room"),
        tuple(
            f'{{"time": "2026-11-30T10:00:0{i}+0000", "message": "{message}", '
            '"worker": "trainer-0/0", "reference": "/l.py:f"}'
            for i, message in enumerate(
                ("user code begins", "user code begins", "user code has ended")
            )
        ),
    ],
    ids=["copied twice", "an earlier process was killed", "an exception ended the process", "JSON"],
)
def test_code_of_the_user_that_did_not_end_the_process_is_not_blamed(lines):
    assert "which must not" not in _blame(*lines)


@pytest.mark.parametrize(
    "lines",
    [
        (_BEGINS, _BEGINS.replace("0/0", "0/1"), _ENDED),
        (_BEGINS, "Traceback (most recent call last):", '  File "/s.py"', "EOFError"),
        (_BEGINS, "trainer trainer-0/0 10:00:02 INFO    connected"),
    ],
    ids=["another rank's has ended", "a consequence is raised", "other threads go on"],
)
def test_code_of_the_user_that_ended_one_of_several_processes_is_blamed(lines):
    assert "while it ran '/l.py:f', which must not end the process" in _blame(*lines)


def _log_of_a_crash(tmp_path, body: str) -> tuple[int, str]:
    """Runs a function of a file that ends its process; returns the exit status and the log."""
    (tmp_path / "native.py").write_text(f"import ctypes, os\ndef crash():\n    {body}\n")
    program = (
        "import faulthandler, sys, threading, time\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import native\n"
        "faulthandler.enable()\n"
        "for _ in range(30): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
        "native.crash()\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    return process.returncode, process.stderr.decode()


def test_a_crash_of_native_code_is_named_with_its_line(tmp_path):
    code, log = _log_of_a_crash(tmp_path, "ctypes.string_at(0)")
    assert code == -11
    cause = first_cause(log)
    assert cause == f"Fatal Python error: Segmentation fault ({tmp_path}/native.py, line 3)"


def test_the_words_of_a_library_that_aborts_are_its_cause(tmp_path):
    body = 'os.write(2, b"  what():  CUDA error: device-side assert\\n"); os.abort()'
    code, log = _log_of_a_crash(tmp_path, body)
    assert code == -6
    assert first_cause(log) == "what():  CUDA error: device-side assert"


@pytest.mark.parametrize(
    ("code", "num_kills", "is_named"),
    [(-9, 1, True), (-9, 0, False), (1, 1, False), (-15, 1, False)],
)
def test_a_kill_while_memory_was_short_says_so(code, num_kills, is_named):
    assert ("memory was short" in _report(code, num_kills)) is is_named


def test_a_killed_workers_last_lines_do_not_hide_that_memory_was_short():
    """The status of a fork is unknown if its parent was killed, too."""
    memory = "(memory was short: the kernel killed processes of its control group)"
    expected = f"w exited with an unknown status {memory} (log: /l)"
    assert _report(None, 2, last_lines="loading\nloaded") == expected


def test_kills_of_the_whole_host_are_only_a_possible_cause():
    memory = "(memory may have been short: the kernel killed processes of this host)"
    assert _report(-9, 1, are_kills_of_host=True) == f"w exited with signal 9 {memory} (log: /l)"


def _report(
    code: int | None,
    num_oom_kills: int,
    *,
    last_lines: str = "",
    are_kills_of_host: bool = False,
) -> str:
    return WorkerExit(
        run_id="r",
        worker_id="w",
        code=code,
        last_lines=last_lines,
        log="/l",
        num_oom_kills=num_oom_kills,
        are_kills_of_host=are_kills_of_host,
    ).report()


def test_an_exception_that_was_raised_again_is_named_once():
    lines = ["Traceback (most recent call last):", '  File "/s.py"', "RuntimeError: no thread"]
    chain = "\nThe above exception was the direct cause of the following exception:\n"
    assert first_cause("\n".join([*lines, chain, *lines])) == "RuntimeError: no thread"
