"""Agents in child processes: return values, and processes that an agent forks."""

import asyncio
from pathlib import Path

import psutil
import pytest

from services.extras.agents.runner import agent_runner
from services.rollout.calls.outside import AddressPolicy
from services.rollout.failures import CallError

AGENTS = """
import asyncio, os, sys
import numpy as np
def forks(number):
    child = os.fork()
    if child == 0:
        return -1.0
    os.waitpid(child, 0)
    return number
def leaves(number):
    sys.exit(3)
async def cancels(number):
    raise asyncio.CancelledError
async def answers(number):
    return {"reward": {"right": np.float32(0.5)}, "metrics": {"turns": np.int64(number)}}
"""


async def test_a_process_that_an_agent_forks_ends_without_an_answer(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    async with agent_runner(f"{tmp_path}/agents.py:forks", 1, AddressPolicy()) as runner:
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*[runner.run({"number": number}) for number in range(8)])
        assert answers == [*range(8)]
        (agent,) = [
            process
            for process in psutil.Process().children()
            if f"{tmp_path}/agents.py:forks" in process.cmdline()
        ]
        assert not agent.children()


@pytest.mark.parametrize("name", ["leaves", "cancels"])
async def test_an_agent_that_ends_its_process_or_task_fails_its_episode_only(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    async with agent_runner(f"{tmp_path}/agents.py:{name}", 1, AddressPolicy()) as runner:
        for _ in range(2):  # the second call shows that the process is still alive
            async with asyncio.timeout(60):
                with pytest.raises(CallError) as failed:
                    await runner.run({"number": 1})
            assert failed.value.kind == "exception"


async def test_an_agent_may_return_numbers_of_numpy(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    async with agent_runner(f"{tmp_path}/agents.py:answers", 1, AddressPolicy()) as runner:
        result = await runner.run({"number": 3})
    assert result == {"reward": {"right": 0.5}, "metrics": {"turns": 3}}
