"""vLLM's process on a GPU ends with its rollout, so that the next rollout finds the memory free."""

import os
import subprocess
import sys

import psutil
import pytest

from services.rollout.engines.vllm.process import EngineContext

_ROLLOUT = """
import time
from services.rollout.engines.vllm.process import EngineContext

if __name__ == "__main__":
    process = EngineContext().Process(target=time.sleep, args=(600,))
    process.start()
    print(process.pid, flush=True)
    process.join()
"""


@pytest.mark.timeout(60)
def test_the_engine_process_ends_with_a_killed_rollout() -> None:
    rollout = subprocess.Popen([sys.executable, "-c", _ROLLOUT], stdout=subprocess.PIPE, text=True)
    assert rollout.stdout is not None
    engine = psutil.Process(int(rollout.stdout.readline()))
    assert engine.is_running()
    rollout.kill()
    rollout.wait()
    engine.wait(timeout=30)
    assert not engine.is_running()


def test_the_exit_status_of_the_engine_process_reaches_the_rollout() -> None:
    process = EngineContext().Process(target=os._exit, args=(7,))
    process.start()
    process.join(30)
    assert process.exitcode == 7
