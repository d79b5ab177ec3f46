"""Tests that vLLM's processes end with their rollout, so that they free the GPU memory for the next one."""

import os
import subprocess
import sys
from multiprocessing.connection import wait

import pytest

from services.extras.vllm.process import EngineContext

_PARENT = """
import time
from services.extras.vllm.process import {context}

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
    child = os.pidfd_open(int(parent.stdout.readline()))
    assert not wait([child], timeout=0)
    parent.kill()
    parent.wait()
    assert wait([child], timeout=30)


def test_the_exit_status_of_the_engine_process_reaches_the_rollout() -> None:
    process = EngineContext().Process(target=os._exit, args=(7,))
    process.start()
    process.join(30)
    assert process.exitcode == 7
