"""Client of the environment protocol: one environment and its sessions."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from services.extras.environments.protocol import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    PROTOCOL,
    Message,
    Observation,
    parse_end,
    parse_observation,
)
from services.rollout.calls.outside import AddressPolicy, ExternalService, delays
from services.rollout.failures import BusyError, CallError

_BUSY = frozenset({429, 503})


class Session(Protocol):
    """One episode of an environment; allows one call at a time."""

    async def step(self, message: Message) -> Observation:
        """Sends the policy's message and returns the next observation. Raises CallError."""

    async def close(self) -> Observation:
        """Ends the episode if it is still running; returns its last reward and metrics. Raises CallError."""


class Environment(Protocol):
    """Starts episodes."""

    async def check(self) -> None:
        """Checks that the environment responds and speaks the protocol. Raises CallError."""

    async def begin(
        self, task: Mapping[str, Any], *, seed: int, sandbox: Mapping[str, str] | None = None
    ) -> tuple[Session, Observation]:
        """Starts an episode.

        Args:
            seed: Seed that all members of a group share.
            sandbox: URL and key of the episode's sandbox, if it has one.

        Raises:
            CallError: If the episode does not start; the message names the environment.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentArgs:
    """Settings of a server of environments in a specification."""

    url: str
    """URL with the name of the protocol, which errors name."""
    arguments: Mapping[str, Any]
    """``rollout.workflow_arguments.arguments``."""
    reach: AddressPolicy
    token: str
    """Token for ``Authorization: Bearer``; empty sends no header."""
    timeout_s: float
    """Deadline of each answer."""
    wait_s: float
    """Max time to retry while the server is full."""


class OpenEnvironment(Protocol):
    """Opens a server of environments of another protocol (door ``slipstream.environments``)."""

    def __call__(self, args: EnvironmentArgs, /) -> AbstractAsyncContextManager[Environment]:
        """Returns a context that opens and closes the server. Raises ValueError if an argument is wrong."""


class HttpEnvironment:
    """An environment that speaks the protocol over HTTP.

    Args:
        timeout_s: Deadline of each answer, including retries.
        wait_s: Max time to retry while the environment is busy.
    """

    def __init__(
        self, name: str, service: ExternalService, *, timeout_s: float, wait_s: float
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._service = service
        self._wait_s = wait_s

    async def check(self) -> None:
        answer = await self.request("GET", "/v1", None, action="answer", wait_s=self.timeout_s)
        if answer.get("protocol") != PROTOCOL:
            raise CallError(
                "invalid_value",
                f"environment {self.name!r} has protocol version {answer.get('protocol')!r}, but this "
                f"rollout needs {PROTOCOL}; serve it with the same release",
            )

    async def begin(
        self, task: Mapping[str, Any], *, seed: int, sandbox: Mapping[str, str] | None = None
    ) -> tuple["HttpSession", Observation]:
        """Starts an episode. Raises CallError naming the environment."""
        body: dict[str, Any] = {"task": dict(task), "seed": seed}
        if sandbox is not None:
            body["sandbox"] = dict(sandbox)
        answer = await self.request(
            "POST", "/v1/episodes", body, action="start an episode", wait_s=self._wait_s
        )
        name = answer.pop("episode", None)
        if not isinstance(name, str):
            raise CallError(
                "invalid_value",
                f"environment {self.name!r} must return the id of its episode as text, got {name!r:.80}",
            )
        return HttpSession(self, name), parse_observation(answer, source=_source(self.name))

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        action: str,
        wait_s: float,
    ) -> dict[str, Any]:
        """Sends a request, with retries, and returns the answer.

        Broken connections are retried until the deadline. This is safe: the environment answers a
        repeated step with the answer that it gave before.

        Raises:
            CallError: ``timeout`` after the deadline, ``exception`` with the environment's error
                message, ``invalid_value`` if the answer is invalid.
        """
        loop, begin = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        why = f"sent no response for {self.timeout_s:g} s"
        for delay_s in delays(FIRST_DELAY_S, MAX_DELAY_S):
            is_busy = False
            left_s = max(begin + max(wait_s, self.timeout_s) - loop.time(), 0.0)
            try:
                async with asyncio.timeout(min(self.timeout_s, left_s)):
                    response = await self._service.send(method, path, body)
                if response.status_code not in _BUSY:
                    return self._checked(response, action)
                why, is_busy = f"had no free episode slot for {wait_s:g} s", True
            except TimeoutError as error:
                message = f"environment {self.name!r} did not {action} in time: it {why}"
                raise CallError("timeout", message) from error
            except (httpx.TransportError, BusyError) as error:
                why = f"does not respond ({error!r})"
            limit_s = wait_s if is_busy else self.timeout_s
            if loop.time() - begin + delay_s > limit_s:
                raise CallError(
                    "timeout" if is_busy else "exception",
                    f"environment {self.name!r} did not {action}: it {why}",
                )
            await asyncio.sleep(delay_s)
        raise AssertionError  # delays() is infinite

    def _checked(self, response: httpx.Response, action: str) -> dict[str, Any]:
        try:
            answer = json.loads(response.content)
        except (ValueError, RecursionError):
            answer = response.text
        if not response.is_success:
            status = f"it returned status {response.status_code}: {answer}"
            reason = answer.get("error", status) if isinstance(answer, Mapping) else status
            raise CallError(
                "exception", f"environment {self.name!r} did not {action}: {reason!s:.500}"
            )
        if not isinstance(answer, dict):
            raise CallError(
                "invalid_value",
                f"environment {self.name!r} must return a JSON object, got {answer!r:.200}",
            )
        return answer


class HttpSession:
    """One episode of an :class:`HttpEnvironment`."""

    def __init__(self, environment: HttpEnvironment, episode: str) -> None:
        self._environment = environment
        self._path = f"/v1/episodes/{episode}"
        self._step = 0

    async def step(self, message: Message) -> Observation:
        environment = self._environment
        self._step += 1
        body = {"step": self._step, "message": dict(message)}
        answer = await environment.request(
            "POST",
            self._path,
            body,
            action=f"answer step {self._step}",
            wait_s=environment.timeout_s,
        )
        if (number := answer.pop("step", None)) != self._step:
            raise CallError(
                "invalid_value",
                f"environment {environment.name!r} returned step {number!r}, expected step "
                f"{self._step}",
            )
        return parse_observation(answer, source=_source(environment.name))

    async def close(self) -> Observation:
        environment = self._environment
        answer = await environment.request(
            "DELETE", self._path, None, action="end its episode", wait_s=environment.timeout_s
        )
        return parse_end(answer, source=_source(environment.name))


def _source(name: str) -> str:
    return f"environment {name!r}"
