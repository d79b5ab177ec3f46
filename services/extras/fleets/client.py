"""One server of a fleet, as the rollout that attached to it sees it."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, Final, Protocol

import httpx

from services.extras.external_engine.request_segments import Segment, TokenChunk
from services.extras.fleets.direct.weights import DirectWeights
from services.extras.fleets.routers import LISTS, parse_servers
from services.extras.fleets.weights import FleetWeights
from services.rollout.calls.outside import AddressPolicy, ExternalService, delays, json_text
from services.rollout.engines.engine_config import EngineConfig
from services.rollout.failures import BusyError, CallError

ANSWER_TIMEOUT_S: Final = 10.0
"""Time-out of a question to a server that it answers at once."""
END_TIMEOUT_S: Final = 2.0
"""Time-out of the end of a session, after which the server ends it by itself."""
SCORE_TIMEOUT_S: Final = 60.0
"""Time-out of the logprobs of a prompt."""
LEAST_RATE: Final = 20e6
"""Lowest bandwidth that the time-out of a transfer allows for, in bytes per second."""
_MAX_PROCESSES: Final = 64
_MAX_ANSWER_BYTES: Final = 64 << 20
OVERLOADED: Final = frozenset({429, 502, 503, 504})
"""Statuses of a server or a proxy that may answer later."""
_RETRY_S: Final = (0.1, 5.0)
"""Max seconds before the first and before later repetitions of a question."""
LONGEST_RETRY_S: Final = 60.0
"""Max seconds of a ``Retry-After`` that this side follows."""

AnyWeights = FleetWeights | DirectWeights
"""A version that this rollout holds, or one that servers receive from the trainer."""
ReadEvent = Callable[[Mapping[str, Any]], TokenChunk | None]
"""Reads the tokens of an event of a response; None for an event without tokens."""


class ServerAwayError(RuntimeError):
    """The server does not answer, or no longer has the session: it may come back."""


class ServerDeferringError(ServerAwayError):
    """The server, or a proxy before it, answered until the time-out that it has too much to do."""


class ServerOverloadedError(RuntimeError):
    """The server, or a proxy before it, has too much to do: it answers later.

    Attributes:
        retry_after_s: Seconds after which it wants to be asked again; 0 if it does not say.
        is_reset: True if the connection ended instead, perhaps because the server died.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0, *, is_reset: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_reset = is_reset


class ServerFailedError(RuntimeError):
    """A server failed in one request, which may be at fault itself: the server keeps its other work."""


class ServerRefusedError(RuntimeError):
    """The server answers, but cannot serve this run; only its operator can change that."""


class ServerBusyError(ServerRefusedError):
    """The server belongs to another owner, who may be about to end."""


class SegmentReader(Protocol):
    """Samples segments in requests that several of them share."""

    async def read(
        self,
        segment: Segment,
        *,
        on_begin: Callable[[], None],
        on_chunk: Callable[[TokenChunk], None],
    ) -> TokenChunk:
        """Samples a segment; see :meth:`groups.TokenGroups.read`."""


class FleetServer(ABC):
    """Attaches to one server, brings weights to it and sends requests.

    Args:
        address: ``http://`` or ``https://``, without a path.
        owner: Name under which this rollout attaches.
        reach: Addresses that servers may have.
        token: The servers' token; empty for none.
        draws_by_seed: True if the same seed must draw the same tokens.
        transport: Replaces the network in tests.
    """

    wrong_path: str
    """Feature that a server that answers 404 lacks, and how to start it."""

    def __init__(
        self,
        address: str,
        *,
        owner: str,
        reach: AddressPolicy,
        token: str = "",
        draws_by_seed: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.address = address
        self.draws_by_seed = draws_by_seed
        self.version: int | None = None
        """Version in service, by the server's last answer; None for none."""
        self.digest = ""
        self.num_running = 0
        self.heard_at = 0.0
        """Time on the event loop's clock of the last token, or of the begin of the first running request."""
        self.resumes_at = 0.0
        """Time on the event loop's clock before which the server gets no further work: it is overloaded."""
        self.refusals: Iterator[float] | None = None
        """Delays after refusals, since the first one without a token after it; None without one."""
        self.was_overloaded = False
        """True once these refusals were reported."""
        self.is_fit = False
        """True once the run has found that the engine can serve it."""
        self.compared: object = None
        """The canary by which the server was compared last."""
        self.is_verified = False
        """True once the version in service has passed all checks."""
        self.token_groups: SegmentReader | None = None
        """Requests of several segments; None for a server that takes one segment in each."""
        self.received: AnyWeights | None = None
        """Weights that the server has received and has not loaded yet."""
        self._owner = owner
        self._session = ""
        self._is_closed = False
        self._processes: deque[str] = deque(maxlen=_MAX_PROCESSES)
        """Processes with which sessions began; a restarted server has a new one."""
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

    @property
    @abstractmethod
    def kv_capacity_tokens(self) -> int:
        """Capacity of the KV cache in tokens, of a server that has attached."""

    @property
    @abstractmethod
    def path(self) -> str:
        """Path of requests for tokens."""

    @abstractmethod
    async def attach(self) -> None:
        """Begins a session, under which the server has no weights yet.

        Raises:
            ServerAwayError: If it does not answer.
            ServerRefusedError: If it has not the interface of a fleet, or belongs to another owner.
        """

    @abstractmethod
    def problems(self, config: EngineConfig) -> Iterator[str]:
        """Yields why the engine of a server that has attached cannot serve a run."""

    @abstractmethod
    async def check(self) -> None:
        """Renews the session and asks for the version in service.

        Raises:
            ServerAwayError: If the server does not answer, or was restarted.
        """

    @abstractmethod
    async def upload(self, weights: AnyWeights) -> None:
        """Sends a version while the server serves another one.

        Raises:
            ServerAwayError: If it does not receive it in time.
            ServerRefusedError: If it cannot hold it.
        """

    @abstractmethod
    async def load(self, weights: AnyWeights) -> None:
        """Puts an uploaded version into service; no response that runs receives tokens of two versions.

        Raises:
            ServerAwayError: If it does not answer in time.
            ServerRefusedError: If it received or holds other weights.
        """

    @abstractmethod
    async def end(self) -> None:
        """Ends the session, so that others can attach at once.

        Raises:
            ServerAwayError: If it does not answer.
            ServerRefusedError: If it answers that it cannot.
        """

    @abstractmethod
    def body(self, segment: Segment) -> Mapping[str, Any]:
        """Returns the request for the tokens of a segment."""

    @abstractmethod
    def read_events(self, segment: Segment) -> ReadEvent:
        """Returns the function that reads the events of the response to :meth:`body`.

        It raises ServerFailedError for a malformed event, and ServerAwayError for tokens under other weights.
        """

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Returns the logprob of each token of a text but the first.

        Raises:
            ServerAwayError: If the server does not answer in time, or no longer serves its version.
            ServerRefusedError: If it refuses the request.
        """

    async def list_servers(self) -> list[str] | None:
        """Returns the servers that a router at this address lists; None if it is no router that lists any.

        Raises:
            ServerAwayError: If it does not answer.
            ServerRefusedError: If it lists others than servers that can serve a run.
        """
        for path in LISTS:
            status, content, _ = await self.send("GET", path)
            if status in OVERLOADED or status >= 500:
                # A router that starts, or a proxy in front of it: what is there shows later.
                raise ServerAwayError(
                    f"{self.address} answered {status} to GET {path}: {reason_of(content)}"
                )
            if status == 200:
                try:
                    return parse_servers(content)
                except ValueError as error:
                    raise ServerRefusedError(f"{self.address}: {error}") from error
        return None

    def note_process(self, process: str) -> None:
        """Notes which process a session began with.

        Raises:
            ServerRefusedError: If several processes answer in turn.
        """
        if process in self._processes and process != self._processes[-1]:
            raise ServerRefusedError(
                f"several servers answer at {self.address}, behind a Service, a router or another balancer; "
                "list each of them in rollout.engine_arguments.addresses"
            )
        if process not in self._processes:
            self._processes.append(process)

    async def close(self) -> None:
        """Ends the session and the connections."""
        if self._session:
            with suppress(ServerAwayError, ServerRefusedError):  # its lease ends
                await self.end()
        self.detach()
        self._is_closed = True
        await self._service.close()

    def detach(self) -> None:
        """Forgets the session: the server gets no work before it has attached and loaded again."""
        self._session, self.received = "", None
        self.withdraw()
        self.is_fit = self.was_overloaded = False
        self.refusals, self.resumes_at = None, 0.0

    def withdraw(self) -> None:
        """Forgets the version in service: the server gets no work before it has loaded another one."""
        self.version, self.digest = None, ""
        self.is_verified, self.compared = False, None

    def serves(self, weights: AnyWeights) -> bool:
        """Returns True if a version is in service, with the digest that this rollout computed."""
        return (self.version, self.digest) == (weights.version, weights.digest)

    def check_fit(self, config: EngineConfig) -> None:
        """Checks that the engine can serve a run.

        Raises:
            ServerRefusedError: If it cannot, with everything that it lacks.
        """
        if problems := [*self.problems(config)]:
            raise ServerRefusedError(f"{self.address}: {'; '.join(problems)}")

    def request_headers(self) -> dict[str, str]:
        """Returns the headers of a request that must sample under the version in service."""
        return {}

    def stream(self, body: Mapping[str, Any]) -> AbstractAsyncContextManager[httpx.Response]:
        """Sends a request for tokens; see :meth:`ExternalService.stream`."""
        return self._service.stream(
            "POST", self.path, json_text(body).encode(), headers=self.request_headers()
        )

    @contextmanager
    def reading(self, answer: object) -> Iterator[None]:
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

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | AsyncIterator[bytes] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
    ) -> Any:
        """Sends a request; returns the content of the answer.

        An overloaded server is asked again until the time-out.

        Raises:
            ServerAwayError: If the server does not answer in time.
            ServerRefusedError: If it refuses the request.
        """
        clock = asyncio.get_running_loop().time
        until = None if timeout_s is None else clock() + timeout_s
        refusal: tuple[int, bytes] | None = None
        for wait_s in delays(*_RETRY_S):
            left_s = None if until is None else until - clock()
            try:
                status, text, after_s = await self.send(
                    method, path, body, headers=headers, timeout_s=left_s
                )
            except ServerAwayError as error:
                # The last try may have a moment only, which says nothing about the server.
                if refusal is not None and isinstance(error.__cause__, TimeoutError):
                    return self._answer(*refusal)
                raise
            refusal = (status, text)
            wait_s = max(wait_s, after_s)
            # Parts of a body are sent once.
            is_last = until is None or clock() + wait_s >= until
            if status not in OVERLOADED or is_last or isinstance(body, AsyncIterator):
                return self._answer(status, text)
            await asyncio.sleep(wait_s)
        raise AssertionError("delays end")

    async def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | AsyncIterator[bytes] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
    ) -> tuple[int, bytes, float]:
        """Sends a request once. Raises like :meth:`ask`.

        Returns:
            Status and content of the answer, and the seconds after which the server wants to be asked again.
        """
        content = json_text(body).encode() if isinstance(body, Mapping) else body
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._service.stream(method, path, content, headers or {}) as response,
            ):
                status, text = response.status_code, await _text(response)
                after_s = retry_after_s(response)
        except TimeoutError as error:
            raise ServerAwayError(
                f"{self.address} did not answer {method} {path} within {timeout_s} s"
            ) from error
        except (httpx.TransportError, BusyError) as error:
            raise ServerAwayError(f"{self.address} does not answer: {error!r}") from error
        except CallError as error:
            raise ServerRefusedError(f"{self.address}: {error}") from error
        except RuntimeError as error:  # httpx has no class of its own for a client that was closed
            if not self._is_closed:
                raise
            raise ServerAwayError(f"{self.address} is no longer a server of this run") from error
        return status, text, after_s

    def _answer(self, status: int, text: bytes) -> Any:
        """Returns the content of an answer; raises the error that its status means."""
        reason = reason_of(text)
        if status in OVERLOADED:
            raise ServerDeferringError(f"{self.address} answered {status}: {reason}")
        if status in (408, 412, 425) or status >= 500:
            raise ServerAwayError(f"{self.address} answered {status}: {reason}")
        if status == 409:
            raise ServerBusyError(f"{self.address}: {reason}")
        if status in (404, 405):
            raise ServerRefusedError(f"{self.address} {self.wrong_path} ({reason})")
        if status != 200:
            raise ServerRefusedError(f"{self.address} answered {status}: {reason}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerRefusedError(f"{self.address} answered no JSON: {reason}") from error


def retry_after_s(response: httpx.Response) -> float:
    """Returns the seconds after which a server wants to be asked again; 0 if it does not say, or by date."""
    text = response.headers.get("retry-after", "")
    return min(float(text), LONGEST_RETRY_S) if text.isdecimal() else 0.0


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
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > _MAX_ANSWER_BYTES:
            raise CallError("invalid_value", f"an answer has more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(content)
