"""One server of a fleet, as the rollout that attached to it sees it."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from services.common.task_group import gather_in_group
from services.extras.fleets.protocol import (
    API,
    ATTACH,
    LOAD,
    SESSION_HEADER,
    STATE,
    VERSION_HEADER,
    WEIGHTS,
)
from services.extras.fleets.weights import BUCKET_BYTES, FleetWeights
from services.rollout.calls.json_text import json_text
from services.rollout.calls.outside import AddressPolicy, ExternalService
from services.rollout.failures import BusyError, CallError

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 10.0
"""Time-out of a question to a server that it answers at once."""
_END_TIMEOUT_S: Final = 2.0
_LOAD_TIMEOUT_S: Final = 120.0
"""Time-out of a load in the server's workers; the longest one copies all weights of a large model."""
_LEAST_RATE: Final = 20e6
"""Lowest bandwidth that the time-out of a transfer allows for, in bytes per second."""
_BUCKETS_AT_ONCE: Final = 2
_MAX_ANSWER_BYTES: Final = 64 << 20


class ServerAwayError(RuntimeError):
    """The server does not answer, or no longer has the session: it may come back."""


class ServerRefusedError(RuntimeError):
    """The server answers, but cannot serve this run; only its operator can change that."""


@dataclass(slots=True, kw_only=True)
class ServerFacts:
    """What a server says about its engine."""

    instance: str
    """Id of the server's process."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Result of ``server.describe_engine``."""


class ServerBusyError(ServerRefusedError):
    """The server belongs to another owner, who may be about to end."""


class FleetServer:
    """Attaches to one server, brings weights to it and sends requests.

    Args:
        address: ``http://`` or ``https://``, without a path.
        owner: Name under which this rollout attaches.
        reach: Addresses that servers may have.
        token: The servers' token; empty for none.
        transport: Replaces the network in tests.
    """

    def __init__(
        self,
        address: str,
        *,
        owner: str,
        reach: AddressPolicy,
        token: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.address = address
        self.facts: ServerFacts | None = None
        self.version: int | None = None
        """Version in service, by the server's last answer; None for none."""
        self.digest = ""
        self.num_running = 0
        self.is_fit = False
        """True once the run has found that the engine can serve it."""
        self.compared: object = None
        """The canary by which the server was compared last."""
        self.is_verified = False
        """True once the version in service has passed all checks."""
        self.received: FleetWeights | None = None
        """Weights that the server has received and has not loaded yet."""
        self._owner = owner
        self._session = ""
        self._service = ExternalService(
            address.rstrip("/"),
            reach=reach,
            token=token,
            transport=transport,
            max_answer_bytes=_MAX_ANSWER_BYTES,
        )

    @property
    def session(self) -> str:
        """Id of the session; empty if this rollout is not attached."""
        return self._session

    async def close(self) -> None:
        """Ends the session, so that others can attach at once, and the connections."""
        if self._session:
            with suppress(ServerAwayError, ServerRefusedError):
                await self._ask("DELETE", ATTACH, timeout_s=_END_TIMEOUT_S)
        self.detach()
        await self._service.close()

    def detach(self) -> None:
        """Forgets the session: the server gets no work before it has attached and loaded again."""
        self._session, self.version, self.digest, self.received = "", None, "", None
        self.is_fit = self.is_verified = False
        self.compared = None

    async def attach(self) -> None:
        """Begins a session, under which the server has no weights yet.

        Raises:
            ServerAwayError: If it does not answer.
            ServerRefusedError: If it is not a member of a fleet, or belongs to another owner.
        """
        self.detach()
        answer = await self._ask("POST", ATTACH, {"owner": self._owner}, is_new=True)
        with self._reading(answer):
            api = answer.get("api")
        if api != API:
            raise ServerRefusedError(
                f"{self.address} has version {api} of the fleet's interface, expected {API}; "
                "install the same release of slipstream there"
            )
        with self._reading(answer):
            facts = ServerFacts(instance=str(answer["instance"]), engine=dict(answer["engine"]))
            self._session, self.facts = str(answer["session"]), facts

    async def check(self) -> None:
        """Renews the session and asks for the version in service.

        Raises:
            ServerAwayError: If the server does not answer, or was restarted.
        """
        self._take(await self._ask("GET", STATE))

    async def upload(self, weights: FleetWeights) -> None:
        """Sends a version, which the server verifies but does not load yet.

        Raises:
            ServerAwayError: If it does not receive it in time.
            ServerRefusedError: If it cannot hold it.
        """
        self.received = None
        announced = {
            "version": weights.version,
            "bucket_bytes": BUCKET_BYTES,
            "tensors": [[spec.name, spec.shape, spec.dtype] for spec in weights.plan.tensors],
        }
        timeout_s = ANSWER_TIMEOUT_S + weights.num_bytes / _LEAST_RATE
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask("POST", WEIGHTS, announced, timeout_s=timeout_s)
                slots = asyncio.Semaphore(_BUCKETS_AT_ONCE)
                await gather_in_group(
                    [self._send(weights, index, slots) for index in range(weights.num_buckets)]
                )
        except TimeoutError as error:
            raise ServerAwayError(
                f"{self.address} did not receive version {weights.version} within {timeout_s:.0f} s"
            ) from error
        self.received = weights

    async def _send(self, weights: FleetWeights, index: int, slots: asyncio.Semaphore) -> None:
        async def parts() -> AsyncIterator[bytes]:
            for part in weights.parts(index):
                yield part

        async with slots:
            await self._ask(
                "PUT",
                f"{WEIGHTS}/{index}",
                parts(),
                headers={
                    "Content-Type": "application/octet-stream",
                    "Content-Length": str(weights.bucket_bytes(index)),
                    VERSION_HEADER: str(weights.version),
                },
                timeout_s=None,
            )

    async def load(self, weights: FleetWeights) -> None:
        """Puts received weights into service; the server cuts responses that still run.

        Raises:
            ServerAwayError: If it does not answer in time.
            ServerRefusedError: If it received or holds other weights.
        """
        self.version, self.digest, self.received = None, "", None
        self.is_verified, self.compared = False, None
        answer = await self._ask(
            "POST",
            LOAD,
            {"version": weights.version, "digest": weights.digest},
            timeout_s=_LOAD_TIMEOUT_S,
        )
        with self._reading(answer):
            differing = [str(name) for name in answer.get("differing") or ()]
        if differing:
            raise ServerRefusedError(
                f"{self.address} holds other weights than version {weights.version}: {len(differing)} "
                f"tensors differ, such as {', '.join(differing[:3])}; check how vLLM was started there"
            )
        self._take(answer)
        if not self.serves(weights):
            raise ServerRefusedError(
                f"{self.address} serves version {self.version} with digest {self.digest[:12]}, expected "
                f"{weights.version} with {weights.digest[:12]}"
            )
        logger.debug("weights loaded", extra={"server": self.address, "ways": answer.get("ways")})

    def serves(self, weights: FleetWeights) -> bool:
        """Returns True if a version is in service, with the digest that this rollout computed."""
        return (self.version, self.digest) == (weights.version, weights.digest)

    def request_headers(self) -> dict[str, str]:
        """Returns the headers of a request that must sample under the version in service."""
        return {SESSION_HEADER: self._session, VERSION_HEADER: str(self.version)}

    def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Sends a request for tokens; see :meth:`ExternalService.stream`."""
        return self._service.stream(
            "POST", path, json_text(body).encode(), headers=self.request_headers()
        )

    async def ask(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Sends a request for one answer under the version in service.

        Raises:
            ServerAwayError: If the server does not answer in time, or no longer serves that version.
            ServerRefusedError: If it refuses the request.
        """
        headers = self.request_headers()
        return await self._ask("POST", path, body, headers=headers, timeout_s=timeout_s)

    def _take(self, state: Mapping[str, Any]) -> None:
        with self._reading(state):
            version = state["version"]
            self.version = None if version is None else int(version)
            self.digest = str(state["digest"])

    @contextmanager
    def _reading(self, answer: object) -> Iterator[None]:
        """Names the server if its answer has not the form that this block reads.

        Raises:
            ServerRefusedError: If so.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefusedError(
                f"{self.address} sent a malformed answer ({error!r}): {answer!s:.300}"
            ) from error

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | AsyncIterator[bytes] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
        is_new: bool = False,
    ) -> Any:
        sent = dict(headers or {}) if is_new else {SESSION_HEADER: self._session, **(headers or {})}
        content = json_text(body).encode() if isinstance(body, Mapping) else body
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._service.stream(method, path, content, sent) as response,
            ):
                status, text = response.status_code, await _text(response)
        except TimeoutError as error:
            raise ServerAwayError(
                f"{self.address} did not answer {method} {path} within {timeout_s} s"
            ) from error
        except (httpx.TransportError, BusyError) as error:
            raise ServerAwayError(f"{self.address} does not answer: {error!r}") from error
        except CallError as error:
            raise ServerRefusedError(f"{self.address}: {error}") from error
        return self._answer(status, text)

    def _answer(self, status: int, text: bytes) -> Any:
        """Returns the content of an answer; raises the error that its status means."""
        shown = reason_of(text)
        if status in (408, 412, 425, 429) or status >= 500:
            raise ServerAwayError(f"{self.address} answered {status}: {shown}")
        if status == 409:
            raise ServerBusyError(f"{self.address}: {shown}")
        if status == 404:
            raise ServerRefusedError(
                f"{self.address} is no member of a fleet ({shown}); start vLLM with --middleware "
                "services.extras.fleets.server.FleetMember and --enable-scale-out"
            )
        if status != 200:
            raise ServerRefusedError(f"{self.address} answered {status}: {shown}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerRefusedError(f"{self.address} answered no JSON: {shown}") from error


def reason_of(text: bytes) -> str:
    """Returns the reason in the body of an error, or its begin if it has none."""
    try:
        error = json.loads(text)["error"]
        reason = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        reason = text.decode(errors="replace")
    return str(reason)[:300]


async def _text(response: httpx.Response) -> bytes:
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > _MAX_ANSWER_BYTES:
            raise CallError("invalid_value", f"an answer has more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(content)
