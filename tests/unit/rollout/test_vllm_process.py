"""vLLM's processes on a GPU end with their rollout, so that the next rollout finds the memory free."""

import os
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from services.rollout.engines.vllm.process import EngineContext

_PARENT = """
import time
from services.rollout.engines.vllm.process import {context}

if __name__ == "__main__":
    process = {context}().Process(target=time.sleep, args=(600,))
    process.start()
    print(process.pid, flush=True)
    process.join()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("context", ["EngineContext", "WorkerContext"])
def test_a_process_ends_with_the_killed_process_that_started_it(context: str) -> None:
    script = _PARENT.format(context=context)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    with suppress(psutil.TimeoutExpired):  # nobody may collect the exit status of an orphan
        child.wait(timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_exit_status_of_the_engine_process_reaches_the_rollout() -> None:
    process = EngineContext().Process(target=os._exit, args=(7,))
    process.start()
    process.join(30)
    assert process.exitcode == 7
