"""Tests of the fork server and its forks."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

HEAVY = "import os\nPID = os.getpid()\n"
WORKER = """
import atexit, json, os, sys, threading
import heavy
atexit.register(lambda: print("at exit"))
facts = {
    "name": __name__,
    "main": sys.modules["__main__"].__spec__.name,
    "arguments": sys.argv,
    "environment": dict(os.environ),
    "loaded_by": heavy.PID,
    "is_leader": os.getsid(0) == os.getpid(),
    "input": sys.stdin.read(),
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "files": sorted(set(os.listdir("/proc/self/fd")) & {"0", "1", "2", "3", "4", "5", "6"}),
}
print(json.dumps(facts))
"""
ENDINGS = {
    "returns": ("pass", 0, ""),
    "exits": ("raise SystemExit(3)", 3, ""),
    "says_why": ("raise SystemExit('no such run')", 1, "no such run\n"),
    "fails": ("raise ValueError('bad')", 1, "ValueError: bad\n"),
    "killed": ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    "asked": ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
    "interrupted": ("import os; os.kill(os.getpid(), 2)", -signal.SIGINT, "KeyboardInterrupt\n"),
}


class Server:
    """Fork server process, and methods that send requests to it."""

    def __init__(self, folder, *modules) -> None:
        self.log = folder / "worker.log"
        self.environment = {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{folder}"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.common.fork_server", *modules],
            env={**os.environ, **self.environment, "ONLY": "the server's"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def order(self, **order) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def ask(self, **order) -> dict:
        self.order(**order)
        return json.loads(self.process.stdout.readline())

    def start(self, module, log=None, **environment) -> int:
        return self.ask(module=module, environment=environment, log=str(log or self.log))["pid"]

    def status(self, pid) -> int:
        return self.ask(ended=pid)["status"]


@contextmanager
def serving(folder, *modules):
    server = Server(folder, *modules)
    with server.process:
        try:
            yield server
        finally:
            server.process.kill()


def test_a_fork_is_as_if_it_had_been_started(tmp_path):
    (tmp_path / "heavy.py").write_text(HEAVY)
    (tmp_path / "worker.py").write_text(WORKER)
    log = tmp_path / "worker.log"
    log.write_text("before\n")
    with serving(tmp_path, "heavy") as server:
        environment = {"LANG": "C.UTF-8", "NAME": "wörker\udcff"}
        assert server.status(server.start("worker", **environment)) == 0
        before, facts, at_exit = log.read_text(encoding="utf-8").splitlines()
        assert (before, at_exit) == ("before", "at exit")
        assert json.loads(facts) == {
            "name": "__main__",
            "main": "worker",
            "arguments": [str(tmp_path / "worker.py")],
            "environment": environment,
            "loaded_by": server.process.pid,
            "is_leader": True,
            "input": "",
            "command": [sys.executable, "-m", "worker"],
            "files": ["0", "1", "2", "3"],  # the last one is the open directory of this listing
        }


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_fork_ends_as_its_program_does(tmp_path, ending):
    code, status, last_line = ENDINGS[ending]
    (tmp_path / "ending.py").write_text(code)
    with serving(tmp_path) as server:
        assert server.status(server.start("ending")) == status
    assert server.log.read_text().endswith(last_line)
    assert ("Traceback" in server.log.read_text()) == (ending in {"fails", "interrupted"})


def test_a_program_that_does_not_exist_is_named_in_the_log(tmp_path):
    with serving(tmp_path) as server:
        assert server.status(server.start("nowhere")) == 1
    assert "No module named nowhere" in server.log.read_text()


def test_a_log_that_cannot_be_opened_is_reported(tmp_path):
    with serving(tmp_path) as server:
        answer = server.ask(module="worker", environment={}, log=str(tmp_path / "no" / "log"))
        assert "No such file" in answer["error"]
        (tmp_path / "worker.py").write_text("")
        assert server.status(server.start("worker")) == 0


def test_failed_imports_do_not_stop_the_fork_server(tmp_path):
    (tmp_path / "broken.py").write_text("print('printed')\nimport nowhere")
    (tmp_path / "worker.py").write_text("")
    with serving(tmp_path, "broken") as server:
        assert server.status(server.start("worker")) == 0
        server.process.stdin.close()
        errors = server.process.stderr.read()
    assert "printed\n" in errors
    assert "No module named 'nowhere'" in errors


def test_a_server_whose_forks_cannot_use_gpus_ends(tmp_path):
    (tmp_path / "torch.py").write_text("class cuda:\n    _is_in_bad_fork = lambda: True")
    with serving(tmp_path, "torch") as server:
        assert server.process.wait() == 0
        assert "CUDA" in server.process.stderr.read()


def test_forks_outlive_the_server_whose_orders_end(tmp_path):
    (tmp_path / "waiting.py").write_text("import signal; signal.pause()")
    with serving(tmp_path) as server:
        worker = psutil.Process(server.start("waiting"))
        server.process.stdin.close()
        assert server.process.wait() == 0
        # Forks inherit neither end of the server's pipes, so the test reads EOF while the worker runs.
        assert server.process.stdout.read() == ""
        assert worker.is_running()
        worker.kill()


def test_cancelled_requests_start_nothing(tmp_path):
    go = tmp_path / "go"
    (tmp_path / "slow.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    )
    (tmp_path / "worker.py").write_text("")
    with serving(tmp_path, "slow") as server:
        server.order(module="worker", environment={}, log=str(server.log))
        server.process.stdin.close()
        go.touch()
        server.process.wait()
    assert not server.log.exists()


def test_an_interrupt_from_the_terminal_does_not_end_the_server(tmp_path):
    (tmp_path / "worker.py").write_text("")
    with serving(tmp_path) as server:
        first = server.start("worker")
        server.process.send_signal(signal.SIGINT)
        assert server.status(first) == 0
        assert server.status(server.start("worker")) == 0


def test_the_exit_status_of_a_foreign_process_is_unknown(tmp_path):
    with serving(tmp_path) as server:
        assert server.status(os.getpid()) is None


def test_forks_draw_different_numbers(tmp_path):
    (tmp_path / "drawing.py").write_text(
        "import random, numpy.random\nprint(random.random(), numpy.random.random())"
    )
    with serving(tmp_path, "random", "numpy.random") as server:
        for _ in range(2):
            server.status(server.start("drawing"))
    first, second = (line.split() for line in server.log.read_text().splitlines())
    assert not set(first) & set(second)


def test_a_fork_computes_with_the_threads_that_it_is_given(tmp_path):
    (tmp_path / "counting.py").write_text("import torch; print(torch.get_num_threads())")
    with serving(tmp_path, "torch") as server:
        for number in ("3", "1"):
            assert server.status(server.start("counting", OMP_NUM_THREADS=number)) == 0
    assert server.log.read_text() == "3\n1\n"
