"""The rollout's side of the protocol: one environment, and its sessions."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol

import httpx

from services.rollout.calls.outside import ExternalService
from services.rollout.environments.protocol import (
    PROTOCOL,
    Message,
    Observation,
    delays,
    parse_end,
    parse_observation,
)
from services.rollout.failures import BusyError, CallError

_BUSY = frozenset({429, 503})


class Session(Protocol):
    """One episode of an environment; at most one call at a time."""

    async def step(self, message: Message) -> Observation:
        """What the policy's message leads to. Raises CallError naming the environment."""
        ...

    async def close(self) -> Observation:
        """End the episode, if it goes on; returns what that earned."""
        ...


class Environment(Protocol):
    """Makes episodes."""

    async def check(self) -> None:
        """Whether it is there and speaks as expected. Raises CallError."""
        ...

    async def begin(self, task: Mapping[str, Any], *, seed: int) -> tuple[Session, Observation]:
        """Begin an episode. Raises CallError naming the environment."""
        ...


class HttpEnvironment:
    """An environment that speaks the protocol over HTTP.

    Args:
        name: What messages call it.
        service: Is asked.
        timeout_s: Deadline of each answer, with everything that is tried again until then.
        wait_s: Longest wait for a place while the environment is busy.
    """

    def __init__(
        self, name: str, service: ExternalService, *, timeout_s: float, wait_s: float
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._service = service
        self._wait_s = wait_s

    async def check(self) -> None:
        """Whether it is there and speaks as expected. Raises CallError."""
        answer = await self.ask("GET", "/v1", None, what="answer", wait_s=self.timeout_s)
        if answer.get("protocol") != PROTOCOL:
            raise CallError(
                "invalid_value",
                f"environment {self.name!r} speaks version {answer.get('protocol')!r} of the protocol, this "
                f"rollout speaks {PROTOCOL}; serve it with the same release",
            )

    async def begin(
        self, task: Mapping[str, Any], *, seed: int
    ) -> tuple["HttpSession", Observation]:
        """Begin an episode. Raises CallError naming the environment."""
        body = {"task": dict(task), "seed": seed}
        answer = await self.ask(
            "POST", "/v1/episodes", body, what="begin an episode", wait_s=self._wait_s
        )
        name = answer.pop("episode", None)
        if not isinstance(name, str):
            raise CallError(
                "invalid_value",
                f"environment {self.name!r} must name its episode with a text, but said {name!r:.80}",
            )
        return HttpSession(self, name), parse_observation(answer, source=_source(self.name))

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        what: str,
        wait_s: float,
    ) -> dict[str, Any]:
        """Ask until there is an answer.

        Broken connections are tried again until the deadline: a step that came twice is answered as before.

        Raises:
            CallError: ``timeout`` past the deadline, ``exception`` with what the environment says is wrong,
                ``invalid_value`` if its answer is none.
        """
        loop, begin = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        why = f"is silent for {self.timeout_s:g} s"
        for delay_s in delays():
            is_busy = False
            left_s = max(begin + max(wait_s, self.timeout_s) - loop.time(), 0.0)
            try:
                async with asyncio.timeout(min(self.timeout_s, left_s)):
                    response = await self._service.send(method, path, body)
                if response.status_code not in _BUSY:
                    return self._checked(response, what)
                why, is_busy = f"had no place for {wait_s:g} s", True
            except TimeoutError as error:
                message = f"environment {self.name!r} did not {what} in time: it {why}"
                raise CallError("timeout", message) from error
            except (httpx.TransportError, BusyError) as error:
                why = f"does not answer ({error!r})"
            limit_s = wait_s if is_busy else self.timeout_s
            if loop.time() - begin + delay_s > limit_s:
                raise CallError(
                    "timeout" if is_busy else "exception",
                    f"environment {self.name!r} did not {what}: it {why}",
                )
            await asyncio.sleep(delay_s)
        raise AssertionError  # delays never end

    def _checked(self, response: httpx.Response, what: str) -> dict[str, Any]:
        try:
            answer = json.loads(response.content)
        except (ValueError, RecursionError):
            answer = response.text
        if not response.is_success:
            status = f"it answered {response.status_code}: {answer}"
            told = answer.get("error", status) if isinstance(answer, Mapping) else status
            raise CallError("exception", f"environment {self.name!r} did not {what}: {told!s:.500}")
        if not isinstance(answer, dict):
            raise CallError(
                "invalid_value",
                f"environment {self.name!r} must answer a JSON object, but answered {answer!r:.200}",
            )
        return answer


class HttpSession:
    """One episode of an :class:`HttpEnvironment`."""

    def __init__(self, environment: HttpEnvironment, episode: str) -> None:
        self._environment = environment
        self._path = f"/v1/episodes/{episode}"
        self._step = 0

    async def step(self, message: Message) -> Observation:
        """What the policy's message leads to. Raises CallError naming the environment."""
        environment = self._environment
        self._step += 1
        body = {"step": self._step, "message": dict(message)}
        answer = await environment.ask(
            "POST",
            self._path,
            body,
            what=f"answer step {self._step}",
            wait_s=environment.timeout_s,
        )
        if (number := answer.pop("step", None)) != self._step:
            raise CallError(
                "invalid_value",
                f"environment {environment.name!r} answered step {number!r} when it was asked for step "
                f"{self._step}",
            )
        return parse_observation(answer, source=_source(environment.name))

    async def close(self) -> Observation:
        """End the episode, if it goes on; returns what that earned."""
        environment = self._environment
        answer = await environment.ask(
            "DELETE", self._path, None, what="end its episode", wait_s=environment.timeout_s
        )
        return parse_end(answer, source=_source(environment.name))


def _source(name: str) -> str:
    return f"environment {name!r}"
