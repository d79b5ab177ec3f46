"""Serves a class of the user's as environments over HTTP, many episodes at once.

``python -m services.rollout.environments.host REFERENCE --bind HOST:PORT`` serves rollouts elsewhere. A
rollout that is given the reference starts this itself, on a Unix socket.

The class is made anew for each episode, with the run's arguments, and has::

    reset(task, seed) -> observation     the first messages, and the tools if there are any
    step(message)     -> observation     what the policy's message leads to
    close()           -> reward | None   optional: the episode ends here, whoever ended it

each a coroutine or a plain function, which gets a thread.
"""

import argparse
import asyncio
import inspect
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TextIO

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.common.callables import load_callable
from services.common.http_server import serve_http
from services.common.lifetime import until_told_to_stop
from services.rollout.environments.protocol import MAX_ANSWER_BYTES, PROTOCOL, wire_size

_MAX_THREADS = 512
_MOST_EPISODES = 4096
_MAX_REQUEST_BYTES = 64 << 20
_MOST_ERROR_CHARACTERS = 2000
# A rollout that died leaves its episodes behind.
_IDLE_S = 3600.0


class _RefusedError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Episode:
    """One instance of the user's class and how far it is."""

    inner: Any
    used_at: float
    step: int = 0
    answer: dict[str, Any] = field(default_factory=dict)
    is_busy: bool = False


class Host:
    """The episodes of one class.

    Args:
        make: Makes an instance for each episode.
        name: What the environment is called.
        arguments: Keyword arguments of ``make``.
        most_episodes: Episodes at once; beyond it, others are told to come later.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        name: str,
        arguments: Mapping[str, Any],
        *,
        most_episodes: int = _MOST_EPISODES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._name = name
        self._arguments = dict(arguments)
        self._most_episodes = most_episodes
        self._now = now
        self._numbers = itertools.count(1)
        self._episodes: dict[str, _Episode] = {}

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/healthz", lambda _: Response()),
                Route("/v1", self._answers(self._describe)),
                Route("/v1/episodes", self._answers(self._begin), methods=["POST"]),
                Route("/v1/episodes/{name}", self._answers(self._step), methods=["POST"]),
                Route("/v1/episodes/{name}", self._answers(self._end), methods=["DELETE"]),
            ]
        )

    def _answers(self, handle: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                return JSONResponse(_bounded(await handle(request)))
            except _RefusedError as error:
                return _refusal(str(error), error.status)
            # The edge to user code: every fault becomes an answer, and none ends the others' episodes.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                return _refusal(f"{type(error).__name__}: {error}", 500)

        return answer

    async def _describe(self, _: Request) -> dict[str, Any]:
        version = getattr(self._make, "version", "")
        return {"protocol": PROTOCOL, "name": self._name, "version": str(version)}

    async def _begin(self, request: Request) -> dict[str, Any]:
        given = json.loads(await request.body())
        self._forget_idle()
        if len(self._episodes) >= self._most_episodes:
            raise _RefusedError(503, f"{len(self._episodes)} episodes are running; come later")
        name = str(next(self._numbers))
        episode = self._episodes[name] = _Episode(None, self._now(), is_busy=True)
        try:
            episode.inner = await asyncio.to_thread(self._make, **self._arguments)
            answer = await _call(episode.inner.reset, given["task"], seed=given["seed"])
        except BaseException:
            del self._episodes[name]
            raise
        episode.is_busy = False
        return {**_as_answer(answer), "episode": name}

    async def _step(self, request: Request) -> dict[str, Any]:
        given = json.loads(await request.body())
        episode, number = self._found(request), given["step"]
        if number == episode.step and not episode.is_busy:
            return episode.answer
        if episode.is_busy or number != episode.step + 1:
            done = "is being worked on" if episode.is_busy else "is the last one"
            raise _RefusedError(409, f"step {number} cannot follow: step {episode.step} {done}")
        episode.is_busy, episode.used_at = True, self._now()
        try:
            answer = _as_answer(await _call(episode.inner.step, given["message"]))
        finally:
            episode.is_busy = False
        episode.step, episode.answer = number, {**answer, "step": number}
        return episode.answer

    async def _end(self, request: Request) -> dict[str, Any]:
        episode = self._found(request)
        del self._episodes[request.path_params["name"]]
        close = getattr(episode.inner, "close", None)
        answer = await _call(close) if close is not None else None
        return {} if answer is None else {"reward": answer}

    def _found(self, request: Request) -> _Episode:
        episode = self._episodes.get(request.path_params["name"])
        if episode is None:
            raise _RefusedError(
                404, "there is no such episode; it has ended, or this process is new"
            )
        return episode

    def _forget_idle(self) -> None:
        oldest = self._now() - _IDLE_S
        for name in [n for n, e in self._episodes.items() if e.used_at < oldest and not e.is_busy]:
            del self._episodes[name]


def _refusal(message: str, status: int) -> JSONResponse:
    """What is wrong, whatever characters a user's error has."""
    shown = message[:_MOST_ERROR_CHARACTERS].encode(errors="backslashreplace").decode()
    return JSONResponse({"error": shown}, status)


def _bounded(answer: dict[str, Any]) -> dict[str, Any]:
    try:
        size = wire_size(answer)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"its answer must be JSON with finite numbers, but is {answer!r:.200} ({error})"
        raise _RefusedError(500, message) from error
    if size > MAX_ANSWER_BYTES:
        message = f"its answer has {size} bytes; at most {MAX_ANSWER_BYTES} are allowed"
        raise _RefusedError(500, message)
    return answer


async def _call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a method of the user's; a plain one must not stop the others."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **keywords)
    return await asyncio.to_thread(function, *arguments, **keywords)


def _as_answer(answer: Any) -> dict[str, Any]:
    if isinstance(answer, Mapping):
        return dict(answer)
    if isinstance(answer, str):
        return {"messages": answer}
    raise TypeError(f"an observation is an object or a text, not {type(answer).__name__}")


async def serve(
    reference: str, arguments: Mapping[str, Any], *, bind: str, is_child: bool, answers: TextIO
) -> None:
    """Serve until told to stop; a child also stops when its standard input ends."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
    try:
        make = await asyncio.to_thread(load_callable, reference)
    except Exception as error:  # noqa: BLE001 -- the edge to user code: every fault becomes an answer
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return
    app = Host(make, reference, arguments).app()
    async with serve_http(bind, app, max_request_bytes=_MAX_REQUEST_BYTES) as port:
        answers.write(json.dumps({"port": port}) + "\n")
        await until_told_to_stop(stop_on_stdin_eof=is_child)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Serve a class as environments.")
    parser.add_argument("reference", help="module:Class or file.py:Class")
    parser.add_argument("--bind", required=True, help="host:port or unix:PATH")
    parser.add_argument("--arguments", default="{}", help="its keyword arguments, as JSON")
    parser.add_argument("--child", action="store_true", help="end with the standard input")
    given = parser.parse_args()
    # The answer keeps the original standard output; whatever user code prints goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    arguments = json.loads(given.arguments)
    asyncio.run(
        serve(given.reference, arguments, bind=given.bind, is_child=given.child, answers=answers)
    )


if __name__ == "__main__":
    main()
