"""Client of OpenEnv servers, with one WebSocket per episode.

Source: ``openenv`` 0.3 to 0.10 (``openenv.core.env_server.types``): ``{"type", "data"}`` messages;
``reset`` takes the task's keys and a seed, ``step`` an action in the server's own format; both
answer with an observation, a reward and a done flag.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from services.common.runspec.rollout import plain_url
from services.extras.environments.client import EnvironmentArgs
from services.extras.environments.protocol import (
    FIRST_DELAY_S,
    MAX_ANSWER_BYTES,
    MAX_DELAY_S,
    Message,
    Observation,
    parse_observation,
)
from services.rollout.calls.outside import AddressPolicy, delays, json_text
from services.rollout.failures import BusyError, CallError

_BUSY = "CAPACITY_REACHED"


@asynccontextmanager
async def open_server(args: EnvironmentArgs) -> AsyncIterator["OpenEnv"]:
    """Yields the server of ``openenv+http://`` or ``openenv+https://``.

    Raises:
        ValueError: If the URL or an argument is wrong.
    """
    if unknown := sorted(set(args.arguments) - {"action", "observe"}):
        raise ValueError(
            "rollout.workflow_arguments.arguments of an OpenEnv server are action and observe, got "
            f"{', '.join(unknown)}"
        )
    yield OpenEnv(
        args.url,
        reach=args.reach,
        action=args.arguments.get("action", {"message": "{message}"}),
        observe=args.arguments.get("observe"),
        token=args.token,
        timeout_s=args.timeout_s,
        wait_s=args.wait_s,
    )


class OpenEnv:
    """An OpenEnv server.

    Args:
        url: ``openenv+http://host:port`` or ``openenv+https://...``.
        action: JSON-like template of an action: the string ``{message}`` in it becomes the policy's
            message.
        observe: Key of the observation that the policy sees; None shows the whole observation as JSON.
        token: Token for ``Authorization: Bearer``; empty sends no header.
        wait_s: Max time to retry while the server is full.
    """

    def __init__(
        self,
        url: str,
        *,
        reach: AddressPolicy,
        action: Mapping[str, Any],
        observe: str | None,
        timeout_s: float,
        wait_s: float,
        token: str = "",
    ) -> None:
        self._name = url
        parts = urlsplit(plain_url(url))
        if not parts.hostname:
            raise ValueError(f"expected openenv+http://host:port, got {url!r}")
        is_secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if is_secure else 80)
        self._url = f"{'wss' if is_secure else 'ws'}://{parts.netloc}{parts.path.rstrip('/')}/ws"
        self._reach = reach
        self._action = action
        self._observe = observe
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s, self._wait_s = timeout_s, wait_s

    async def check(self) -> None:
        """Checks the server by starting and ending an episode. Raises CallError."""
        session, _ = await self.begin({}, seed=0)
        await session.close()

    async def begin(
        self, task: Mapping[str, Any], *, seed: int, sandbox: Mapping[str, str] | None = None
    ) -> tuple["OpenEnvSession", Observation]:
        """Starts an episode; retries while the server is down or full. Raises CallError naming the server."""
        del sandbox  # the protocol cannot pass one on, so the specification may not ask for one
        from websockets.exceptions import WebSocketException

        loop, begin = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        for delay_s in delays(FIRST_DELAY_S, MAX_DELAY_S):
            passed_s = loop.time() - begin + delay_s
            try:
                return await self._begin_now(task, seed)
            except BusyError as error:
                if passed_s > self._wait_s:
                    message = (
                        f"environment {self._name!r} did not start an episode: it had no free slot for "
                        f"{self._wait_s:g} s"
                    )
                    raise CallError("timeout", message) from error
            except ValueError as error:  # it redirects to another host
                message = f"environment {self._name!r} did not start an episode: {error}"
                raise CallError("exception", message) from error
            except (OSError, WebSocketException) as error:  # it may be restarting
                if passed_s > self._timeout_s:
                    message = f"environment {self._name!r} did not start an episode: {error!r}"
                    raise CallError("exception", message) from error
            await asyncio.sleep(delay_s)
        raise AssertionError  # delays() is infinite

    def action_of(self, message: Message) -> Any:
        return _filled(self._action, str(message.get("content") or ""))

    async def _begin_now(
        self, task: Mapping[str, Any], seed: int
    ) -> tuple["OpenEnvSession", Observation]:
        # Imported here because only the extra `openenv` installs it.
        from websockets.asyncio.client import connect

        try:
            async with asyncio.timeout(self._timeout_s):
                address = await self._reach.resolve(self._host, self._port)
                socket = await connect(
                    self._url,
                    host=address,
                    port=self._port,
                    max_size=MAX_ANSWER_BYTES,
                    compression=None,
                    additional_headers=self._headers,
                    proxy=None,
                )
        except BusyError as error:  # no server answered, so it is not full
            raise ConnectionError(str(error)) from error
        except TimeoutError as error:
            message = (
                f"environment {self._name!r} did not start an episode within {self._timeout_s:g} s"
            )
            raise CallError("timeout", message) from error
        session = OpenEnvSession(
            self._name,
            socket,
            self.action_of,
            observe=self._observe,
            timeout_s=self._timeout_s,
        )
        try:
            return session, await session.send("reset", {**task, "seed": seed})
        except BaseException:
            await socket.close()
            raise


class OpenEnvSession:
    """One episode of an OpenEnv server."""

    def __init__(
        self,
        name: str,
        socket: Any,
        action_of: Callable[[Message], Any],
        *,
        observe: str | None,
        timeout_s: float,
    ) -> None:
        self._name = name
        self._socket = socket
        self._action_of = action_of
        self._observe = observe
        self._timeout_s = timeout_s

    async def step(self, message: Message) -> Observation:
        """Sends the policy's message and returns the next observation. Raises CallError naming the server."""
        return await self.send("step", self._action_of(message))

    async def close(self) -> Observation:
        """Ends the episode; returns an observation without a reward."""
        await self._socket.close()
        return Observation(is_done=True)

    async def send(self, kind: str, data: Any) -> Observation:
        """Sends a message and returns the observation that answers it.

        Raises:
            BusyError: If the server has no room for another episode.
            CallError: If the answer is missing or is not an observation.
        """
        from websockets.exceptions import ConnectionClosed, WebSocketException

        message = json_text({"type": kind, "data": data})
        try:
            async with asyncio.timeout(self._timeout_s):
                # A full server reports this before it receives anything, and closes.
                with suppress(ConnectionClosed):
                    await self._socket.send(message)
                answer = json.loads(await self._socket.recv())
        except TimeoutError as error:
            message = (
                f"environment {self._name!r} did not respond to {kind} within {self._timeout_s:g} s"
            )
            raise CallError("timeout", message) from error
        except (WebSocketException, OSError) as error:
            message = f"environment {self._name!r} closed the connection during {kind}: {error}"
            raise CallError("exception", message) from error
        except (ValueError, RecursionError) as error:
            message = f"environment {self._name!r} responded to {kind} with invalid JSON"
            raise CallError("invalid_value", message) from error
        return self._observation(answer, kind)

    def _observation(self, answer: Any, kind: str) -> Observation:
        content = answer.get("data") if isinstance(answer, Mapping) else None
        if not isinstance(content, Mapping):
            raise CallError(
                "invalid_value",
                f"environment {self._name!r} must respond to {kind} with an object that has data, got "
                f"{answer!r:.200}",
            )
        if content.get("code") == _BUSY:
            raise BusyError
        if answer.get("type") == "error":
            raise CallError(
                "exception",
                f"environment {self._name!r} rejected {kind}: {content.get('message')!s:.500}",
            )
        observation = content.get("observation")
        if self._observe is not None:
            if not isinstance(observation, Mapping) or self._observe not in observation:
                raise CallError(
                    "invalid_value",
                    f"environment {self._name!r} returned the observation {observation!r:.200}, which has no "
                    f"{self._observe!r}; set rollout.workflow_arguments.arguments.observe to one of its keys",
                )
            observation = observation[self._observe]
        reward = content.get("reward")
        return parse_observation(
            {
                "messages": observation
                if isinstance(observation, str)
                else json.dumps(observation, ensure_ascii=False),
                "done": content.get("done", False),
                "reward": None if reward is None else float(reward),
            },
            source=f"environment {self._name!r}",
        )


def _filled(template: Any, text: str) -> Any:
    """Replaces the placeholder in an action template with the policy's message."""
    if template == "{message}":
        return text
    if isinstance(template, Mapping):
        return {key: _filled(value, text) for key, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, text) for value in template]
    return template
