"""Tests of processes that an environment in a child process forks."""

import asyncio
from pathlib import Path

import psutil

from services.extras.environments.local import LocalEnvironment

FORKING = """
import os

class Forking:
    def reset(self, task, *, seed):
        return "begin"

    def step(self, message):
        child = os.fork()
        if child == 0:
            return {"messages": "of the fork"}
        os.waitpid(child, 0)
        return {"messages": "of the parent"}
"""


async def test_a_process_that_an_environment_forks_ends_without_an_answer(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    reference = f"{tmp_path}/forking.py:Forking"
    environment = LocalEnvironment(reference, {}, folder=tmp_path, timeout_s=10, wait_s=1)
    try:
        async with asyncio.timeout(60):
            session, _ = await environment.begin({}, seed=0)
            for _ in range(3):
                observation = await session.step({"role": "user", "content": ""})
                assert "of the parent" in str(observation.messages)
        (host,) = [
            process for process in psutil.Process().children() if reference in process.cmdline()
        ]
        assert not host.children()
    finally:
        await environment.stop()
