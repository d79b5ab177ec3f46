"""HTTP server that runs a user's class as an environment, with many concurrent episodes.

``python -m services.extras.environments.host REFERENCE --bind HOST:PORT --token-file FILE`` serves
remote rollouts. A rollout that is configured with the class itself starts this module on a Unix
socket, without a token.

Each episode gets a new instance of the class, created with the run's arguments. The class has::

    reset(task, seed) -> observation     first messages, and tools if there are any; if the run has sandboxes,
                                         with the keyword argument sandbox
    step(message)     -> observation     the answer to the policy's message
    close()           -> reward | None   optional; called at the end, whichever side ends it

each a coroutine or a plain function, which runs in a thread.
"""

import argparse
import asyncio
import inspect
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TextIO

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.common.callables import load_callable
from services.common.errors import InvalidArgumentError
from services.common.lifetime import wait_for_shutdown
from services.common.parent import call_ending_forks, die_with_parent
from services.extras.agents.remote_sandbox import sandbox_argument
from services.extras.environments.guard import add_options, serve_guarded
from services.extras.environments.protocol import MAX_ANSWER_BYTES, PROTOCOL, as_json

_MAX_THREADS = 512
_MAX_EPISODES = 1024
_MAX_ERROR_CHARACTERS = 2000
# Limits episodes that a dead rollout leaves behind; long enough for a slow reply of the policy.
_IDLE_S = 1800.0


class _RefusedError(Exception):
    """Answers a request with a status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class _Episode:
    """One instance of the user's class and its state."""

    inner: Any = None
    step: int = 0
    answer: dict[str, Any] = field(default_factory=dict)
    is_busy: bool = True
    expiry: asyncio.TimerHandle | None = None


class Host:
    """Runs the episodes of one class.

    Args:
        make: Creates the instance of an episode.
        arguments: Keyword arguments of ``make``.
        max_episodes: Max concurrent episodes; further ones get status 503.
        idle_s: Seconds without a request after which an episode is ended.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        name: str,
        arguments: Mapping[str, Any],
        *,
        max_episodes: int = _MAX_EPISODES,
        idle_s: float = _IDLE_S,
    ) -> None:
        self._make = make
        self._name = name
        self._arguments = dict(arguments)
        self._max_episodes = max_episodes
        self._idle_s = idle_s
        self._ending: set[asyncio.Task[Any]] = set()
        self._episodes: dict[str, _Episode] = {}

    def app(self) -> Starlette:
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
                content = _bounded(await handle(request))
                return Response(content, media_type="application/json")
            except _RefusedError as error:
                return _refusal(str(error), error.status)
            # Boundary to user code: every exception becomes an answer, so that other episodes continue.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                return _refusal(f"{type(error).__name__}: {error}", 500)

        return answer

    async def _describe(self, _: Request) -> dict[str, Any]:
        version = getattr(self._make, "version", "")
        return {"protocol": PROTOCOL, "name": self._name, "version": str(version)}

    async def _begin(self, request: Request) -> dict[str, Any]:
        fields = await _body(request, "task", "seed")
        if len(self._episodes) >= self._max_episodes:
            raise _RefusedError(
                503, f"all {len(self._episodes)} episode slots are in use; retry later"
            )
        # The name is unguessable because it is the only credential for the episode.
        name = secrets.token_urlsafe(24)
        episode = self._episodes[name] = _Episode()
        try:
            episode.inner = await _call(self._make, **self._arguments)
            options = {}
            if fields.get("sandbox") is not None:
                options["sandbox"] = sandbox_argument(fields["sandbox"], episode.inner.reset)
            answer = await _call(
                episode.inner.reset, fields["task"], seed=fields["seed"], **options
            )
        except BaseException:
            del self._episodes[name]
            raise
        self._is_idle(name, episode)
        return {**_as_answer(answer), "episode": name}

    async def _step(self, request: Request) -> dict[str, Any]:
        fields = await _body(request, "step", "message")
        episode, number = self._found(request), fields["step"]
        if number == episode.step and not episode.is_busy:
            return episode.answer
        if episode.is_busy or number != episode.step + 1:
            state = "is running" if episode.is_busy else "is the last one"
            raise _RefusedError(409, f"step {number} cannot follow: step {episode.step} {state}")
        self._is_used(episode)
        try:
            answer = _as_answer(await _call(episode.inner.step, fields["message"]))
        finally:
            self._is_idle(request.path_params["name"], episode)
        episode.step, episode.answer = number, {**answer, "step": number}
        return episode.answer

    async def _end(self, request: Request) -> dict[str, Any]:
        episode = self._found(request)
        return await self._close(request.path_params["name"], episode)

    async def _close(self, name: str, episode: _Episode) -> dict[str, Any]:
        del self._episodes[name]
        self._is_used(episode)
        close = getattr(episode.inner, "close", None)
        answer = await _call(close) if close is not None else None
        return {} if answer is None else {"reward": answer}

    def _is_used(self, episode: _Episode) -> None:
        episode.is_busy = True
        if episode.expiry is not None:
            episode.expiry.cancel()

    def _is_idle(self, name: str, episode: _Episode) -> None:
        episode.is_busy = False
        if name in self._episodes:
            loop = asyncio.get_running_loop()
            episode.expiry = loop.call_later(self._idle_s, self._expire, name, episode)

    def _expire(self, name: str, episode: _Episode) -> None:
        task = asyncio.ensure_future(self._close(name, episode))
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            print(f"closing an idle episode failed: {error!r}", file=sys.stderr)  # noqa: T201

    def _found(self, request: Request) -> _Episode:
        episode = self._episodes.get(request.path_params["name"])
        if episode is None:
            raise _RefusedError(404, "unknown episode; it has ended, or this process was restarted")
        return episode


async def _body(request: Request, *keys: str) -> dict[str, Any]:
    """Returns a request's JSON object. Raises _RefusedError if it is invalid or lacks one of the keys."""
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise _RefusedError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict) or not body.keys() >= set(keys):
        raise _RefusedError(400, f"the body must be an object with {' and '.join(keys)}")
    return body


def _refusal(message: str, status: int) -> JSONResponse:
    """Returns an error answer; escapes characters that UTF-8 cannot encode, which a user's error may have."""
    text = message[:_MAX_ERROR_CHARACTERS].encode(errors="backslashreplace").decode()
    return JSONResponse({"error": text}, status)


def _bounded(answer: dict[str, Any]) -> bytes:
    try:
        content = as_json(answer)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"its result must be JSON with finite numbers, got {answer!r:.200} ({error})"
        raise _RefusedError(500, message) from error
    if len(content) > MAX_ANSWER_BYTES:
        message = f"its result has {len(content)} bytes, more than the limit of {MAX_ANSWER_BYTES}"
        raise _RefusedError(500, message)
    return content


async def _call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Calls a user's method; a plain function runs in a thread so that it does not block other episodes."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **keywords)
    return await asyncio.to_thread(call_ending_forks, function, *arguments, **keywords)


def _as_answer(answer: Any) -> dict[str, Any]:
    if isinstance(answer, Mapping):
        return dict(answer)
    if isinstance(answer, str):
        return {"messages": answer}
    raise TypeError(f"an observation must be an object or text, got {type(answer).__name__}")


async def serve(options: argparse.Namespace, answers: TextIO) -> None:
    """Serves until a signal arrives; a child process also stops when its standard input ends.

    Raises:
        SystemExit: With status 1 if the class cannot be loaded; the answer contains the reason.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MAX_THREADS))
    try:
        make = await asyncio.to_thread(load_callable, options.reference)
    except Exception as error:  # noqa: BLE001 -- boundary to user code: every exception becomes an answer
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        raise SystemExit(1) from None
    host = Host(
        make,
        options.reference,
        options.arguments,
        max_episodes=options.max_episodes,
        idle_s=options.idle_s,
    )
    async with serve_guarded(host.app(), options) as port:
        answers.write(json.dumps({"port": port}) + "\n")
        await wait_for_shutdown(stop_on_stdin_eof=options.child)


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def main() -> None:
    """Entry point of ``python -m services.extras.environments.host``."""
    parser = argparse.ArgumentParser(description="Serve environments of a class over HTTP.")
    parser.add_argument("reference", help="module:Class or file.py:Class")
    add_options(parser)
    parser.add_argument(
        "--arguments",
        type=_json_object,
        default={},
        help="keyword arguments of the class, as JSON",
    )
    parser.add_argument(
        "--max-episodes", type=int, default=_MAX_EPISODES, help="max simultaneous episodes"
    )
    parser.add_argument(
        "--idle-s",
        type=float,
        default=_IDLE_S,
        help="seconds without a request after which an episode is closed",
    )
    parser.add_argument(
        "--child", action="store_true", help="exit at the end of the standard input"
    )
    options = parser.parse_args()
    if options.child:
        die_with_parent()
    # The parent reads the answer from the original standard output; user code prints to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        asyncio.run(serve(options, answers))
    except (ValueError, InvalidArgumentError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
