"""Agents in processes: answers, and processes that an agent forks."""

import asyncio
from pathlib import Path

import psutil

from services.rollout.calls.agents import agent_runner
from services.rollout.calls.outside import AddressPolicy

AGENTS = """
import os
def forks(number):
    child = os.fork()
    if child == 0:
        return -1.0
    os.waitpid(child, 0)
    return number
"""


async def test_a_process_that_an_agent_forks_ends_without_an_answer(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    async with agent_runner(f"{tmp_path}/agents.py:forks", 1, AddressPolicy()) as runner:
        async with asyncio.timeout(60):
            found = await asyncio.gather(*[runner.run({"number": each}) for each in range(8)])
        assert found == [*range(8)]
        (agent,) = [
            process
            for process in psutil.Process().children()
            if f"{tmp_path}/agents.py:forks" in process.cmdline()
        ]
        assert not agent.children()
