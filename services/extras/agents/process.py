"""Process that runs the user's agent, many episodes concurrently.

It reads JSON lines: ``{"id", "keywords"}`` starts an episode, and ``{"cancel": id}`` cancels it. It
writes ``{"id", "value"}`` or ``{"id", "error"}`` when an episode has ended, and a line with ``"id":
null`` when the agent is loaded. Coroutines share the event loop; plain functions run in threads.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TextIO

from services.common.callables import describe_error, load_callable
from services.common.parent import call_ending_forks, die_with_parent, disconnect_forks
from services.common.task_group import TaskGroup, is_cancelled
from services.extras.agents.remote_sandbox import sandbox_argument
from services.rollout.calls.outside import json_text

_LINE_BYTES = 64 << 20
_MAX_THREADS = 512
_MAX_REWARD_BYTES = 64 << 10


async def serve(reference: str, answers: TextIO) -> None:
    """Runs episodes until the input ends."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
    lines = asyncio.StreamReader(limit=_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running: dict[int, asyncio.Task[None]] = {}
    try:
        agent = load_callable(reference)
    except Exception as error:  # noqa: BLE001 -- the edge to user code: every fault becomes an answer
        _answer(answers, {"id": None, "error": f"{type(error).__name__}: {error}"})
        return
    _answer(answers, {"id": None})
    async with TaskGroup() as tasks:
        while line := await lines.readline():
            message = json.loads(line)
            if "cancel" in message:
                if (task := running.get(message["cancel"])) is not None:
                    task.cancel()
                continue
            number = message["id"]
            running[number] = tasks.create_task(_run(agent, message, answers))
            running[number].add_done_callback(partial(_forget, running, number))
        for task in running.values():
            task.cancel()


async def _run(agent: Callable[..., Any], message: dict[str, Any], answers: TextIO) -> None:
    """Runs one episode and writes its answer."""
    answer: dict[str, Any] = {"id": message["id"]}
    keywords = message["keywords"]
    try:
        if "sandbox" in keywords:
            keywords["sandbox"] = sandbox_argument(keywords["sandbox"], agent)
        if inspect.iscoroutinefunction(agent):
            value = await agent(**keywords)
        else:
            value = await asyncio.to_thread(call_ending_forks, agent, **keywords)
        answer["value"] = _reward(value)
    # The edge to user code: every fault becomes an answer, and the other episodes go on.
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        answer["error"] = describe_error(error)
    _answer(answers, answer)


def _reward(value: Any) -> Any:
    """Returns the agent's result as its episode's reward; None unless it is a number or a dict."""
    text = json_text(value)
    plain = json.loads(text)
    if not isinstance(plain, int | float | dict):
        return None
    if (size := len(text)) > _MAX_REWARD_BYTES:
        raise ValueError(f"its result has {size} bytes, more than the limit of {_MAX_REWARD_BYTES}")
    return plain


def _forget(running: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del running[number]


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")


def main() -> None:
    """Runs the process: ``python -m services.extras.agents.process REFERENCE``."""
    die_with_parent()
    # Answers use the original standard output; output of the agent goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    disconnect_forks(answers.fileno(), sys.stdin.fileno())
    asyncio.run(serve(sys.argv[1], answers))


if __name__ == "__main__":
    main()
