"""Servers of a run: attached, brought to the newest weights, verified, and chosen for each segment.

A server gets work only while it serves the fleet's version, with the digest that this rollout computed, and
with logprobs of the canary that agree with the other servers'. One that dies, restarts or differs is named
once and gets no work before it has attached again and received the current version.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from services.common.task_group import TaskGroup, gather_in_group, unwrapped
from services.common.telemetry.metrics import SYNC
from services.extras.fleets.client import (
    LONGEST_RETRY_S,
    AnyWeights,
    FleetServer,
    ServerAwayError,
    ServerBusyError,
    ServerDeferringError,
    ServerOverloadedError,
    ServerRefusedError,
)
from services.extras.fleets.direct.weights import DirectWeights
from services.extras.fleets.protocol import LEASE_S
from services.extras.fleets.routers import check_hosts
from services.rollout.calls.outside import delays
from services.rollout.engines.base import EngineDiedError
from services.weightsync.canary import difference

logger = logging.getLogger(__name__)

_PROBE_EVERY_S: Final = 2.0
"""Interval of a server's checks, which also renew its session."""
_MAX_WAIT_S: Final = 60.0
"""Max interval at which a server that refused is asked again."""
_SLACK: Final = 4
"""Further running requests that a server may have before a sibling goes to another one."""
_MAX_PREFIXES: Final = 4096
_GRACE_S: Final = 5.0
_OVERLOAD_DELAYS_S: Final = (0.5, 30.0)
"""Max seconds without further work for an overloaded server, at first and later."""
_OVERLOAD_DEADLINE_S: Final = 300.0
"""Seconds without a token from any server, since one was overloaded first, after which the engine ends."""
_SILENCE_S: Final = 60.0
"""Longest time without a token from a server with running requests, after which its engine must score a text:
a frozen engine does not keep the server's HTTP interface from answering."""
_PROBE_TEXT: Final = (0, 0)
_MAX_REFUSAL_GAP_S: Final = 2 * LONGEST_RETRY_S
"""Max seconds between two refusals that count for the deadline: in a longer time no request was sent."""

SERVING: Final = Gauge(
    "slipstream_fleet_serving_servers", "Servers of the fleet that serve its weight version."
)
CHANGES: Final = Counter(
    "slipstream_fleet_server_changes_total",
    "Servers that began to serve, that were lost, or that were refused.",
    ["change"],
)
REFUSALS: Final = Counter(
    "slipstream_fleet_refused_requests_total",
    "Requests for tokens that an overloaded server or proxy refused, or whose connection it reset.",
)
UPLOAD_SECONDS: Final = Histogram(
    "slipstream_fleet_upload_duration_seconds",
    "Time to send a weight version to one server.",
    buckets=SYNC,
)


class NoServerError(RuntimeError):
    """No server of the fleet serves its version."""


@dataclass(frozen=True, slots=True)
class _Canary:
    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class _Refusals:
    """Refusals of all servers since the last token from any of them."""

    reason: str
    """The first one."""
    newest_at: float
    seconds: float = 0.0
    """Duration, without times in which no request was sent."""

    def add(self, now: float) -> None:
        """Counts the time since the refusal before."""
        self.seconds += min(now - self.newest_at, _MAX_REFUSAL_GAP_S)
        self.newest_at = now


class Fleet:
    """Keeps all servers of a run on its newest weights.

    Args:
        addresses: Addresses of servers, and of routers, which are asked for their servers.
        make: Returns the client of a server at an address.
        allowed_hosts: Hosts that a router may name.
        check: Raises ServerRefusedError if a server that has attached cannot serve the run.
        tolerance: Max mean absolute difference of the canary's logprobs between two servers.
        report: Receives what happened to which server, for people.
        on_lost: Called when a server gets no more work; its responses must end.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        make: Callable[[str], FleetServer],
        allowed_hosts: Collection[str],
        check: Callable[[FleetServer], None],
        tolerance: float,
        report: Callable[[str, str], None],
        on_lost: Callable[[FleetServer], None] = lambda server: None,
    ) -> None:
        self._make = make
        self._allowed_hosts = allowed_hosts
        self._servers: list[FleetServer] = []
        self._routers: dict[str, list[str]] = {}
        """Servers that each router listed last, by its address."""
        self._check = check
        self._tolerance = tolerance
        self._report = report
        self._on_lost = on_lost
        self._weights: AnyWeights | None = None
        self._canary: _Canary | None = None
        self._plain: set[str] = set()
        """Addresses at which servers answer, not routers."""
        self._addresses = tuple(addresses)
        self._locks: dict[str, asyncio.Lock] = {}
        self._kicks: dict[str, asyncio.Event] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, str] = {}
        self._excluded: dict[str, ServerRefusedError] = {}
        """Reasons of the servers that answered, but refused."""
        self._prefixes: OrderedDict[Hashable, FleetServer] = OrderedDict()
        self._changed = asyncio.Event()
        self._num_scored = 0
        self._refusals: _Refusals | None = None

    @property
    def version(self) -> int | None:
        """Version that servers must serve; None before the first."""
        return None if self._weights is None else self._weights.version

    @property
    def serving(self) -> list[FleetServer]:
        """Servers that get work."""
        return [server for server in self._servers if self._is_serving(server)]

    @property
    def attached(self) -> list[FleetServer]:
        """Servers that have attached and can serve this run, whatever their weights."""
        return [server for server in self._servers if server.session and server.is_fit]

    async def run(self) -> None:
        """Attaches servers and keeps them on the newest weights, until cancelled."""
        with unwrapped():
            async with TaskGroup() as tasks:
                for address in self._addresses:
                    self._add(address, tasks)
                tasks.create_task(self._watch_engines(tasks))
                self._notify()
                while True:
                    await self._change()
                    await self._follow_routers(tasks)

    def _add(self, address: str, tasks: TaskGroup) -> None:
        if address not in self._keeping:
            server = self._make(address)
            self._locks[address], self._kicks[address] = asyncio.Lock(), asyncio.Event()
            self._servers.append(server)
            self._keeping[address] = tasks.create_task(self._keep(server))

    async def _follow_routers(self, tasks: TaskGroup) -> None:
        """Adds the servers that routers list, and removes those that no router lists any more."""
        listed_addresses = {address for servers in self._routers.values() for address in servers}
        for address in listed_addresses:
            self._add(address, tasks)
        for server in [*self._servers]:
            if server.address not in {*listed_addresses, *self._addresses}:
                self._servers.remove(server)
                self._keeping.pop(server.address).cancel()
                self._excluded.pop(server.address, None)
                self._name(server, "its router no longer lists it", change="lost")
                self._detach(server)
                await server.close()
                self._notify()

    async def wait_attached(self) -> None:
        """Waits until one server can serve this run.

        Raises:
            ServerRefusedError: If all servers answer, and none can.
        """
        clock = asyncio.get_running_loop().time
        started_at = clock()
        while not self.attached:
            if self._servers and len(self._excluded) == len(self._servers) - len(self._routers):
                is_busy = any(
                    isinstance(error, ServerBusyError) for error in self._excluded.values()
                )
                # An owner that was killed keeps its servers until its lease ends.
                if not is_busy or clock() - started_at > LEASE_S + _PROBE_EVERY_S:
                    raise ServerRefusedError("; ".join(map(str, self._excluded.values())))
            await self._change()

    async def close(self) -> None:
        for server in self._servers:
            await server.close()

    async def upload(self, weights: AnyWeights) -> None:
        """Sends a version to the serving servers, which keep serving the version before.

        Before the first version, to all attached ones. A server that comes meanwhile receives it later.
        """
        servers = self.serving or self.attached
        await gather_in_group([self._upload(server, weights) for server in servers])

    def switch(self, weights: AnyWeights) -> list[FleetServer]:
        """Makes a version the fleet's; returns the servers that have received it and load it now.

        Others receive and load it as they come.
        """
        self._weights, self._canary = weights, None
        for kick in self._kicks.values():
            kick.set()
        self._notify()
        return [server for server in self._servers if server.received is weights]

    async def wait_loaded(self, weights: AnyWeights, loading: Sequence[FleetServer]) -> float:
        """Waits until servers serve a version, or are lost.

        A slow one delays the others by ``_GRACE_S`` seconds at most, in which they sample already.

        Returns:
            Seconds until the first one served; 0 if none did.
        """
        clock = asyncio.get_running_loop().time
        started_at, first_s, until = clock(), None, None
        while weights is self._weights:
            if first_s is None and self.serving:
                first_s = clock() - started_at
                until = clock() + _GRACE_S
            if not any(server.session and not self._is_serving(server) for server in loading):
                break
            try:
                async with asyncio.timeout_at(until):
                    await self._change()
            except TimeoutError:
                break
        return first_s or 0.0

    async def wait_serving(self) -> None:
        """Waits until a server gets work."""
        while not self.serving:
            await self._change()

    @asynccontextmanager
    async def lease(
        self, prefix: Hashable, avoided: Collection[str] = ()
    ) -> AsyncIterator[FleetServer]:
        """Waits for a serving server, and holds a place on it while the block runs.

        Args:
            prefix: Requests with the same one go to the same server, whose cache has their prompt, unless it
                has more to do than others.
            avoided: Addresses of servers that get the request only if no other one serves.
        """
        while (server := self._choose(prefix, avoided)) is None:
            await self._change()
        if not server.num_running:
            server.heard_at = asyncio.get_running_loop().time()
        server.num_running += 1
        try:
            yield server
        finally:
            server.num_running -= 1

    def recheck(self, server: FleetServer) -> None:
        """Checks a server now; it keeps its work unless the check fails."""
        self._kicks[server.address].set()

    def slow_down(self, server: FleetServer, error: ServerOverloadedError) -> float:
        """Gives an overloaded server no further work for a while; it keeps what it has, and is checked.

        Returns:
            Seconds after which it gets work again.

        Raises:
            EngineDiedError: If requests got refusals and no token for ``_OVERLOAD_DEADLINE_S``.
        """
        now = asyncio.get_running_loop().time()
        REFUSALS.inc()
        all_refusals = self._refusals = self._refusals or _Refusals(str(error), now)
        all_refusals.add(now)
        if all_refusals.seconds > _OVERLOAD_DEADLINE_S:
            raise EngineDiedError(
                f"no server of the fleet has sent a token for {all_refusals.seconds:.0f} s; the first "
                f"reason: {all_refusals.reason}"
            )
        is_first = server.refusals is None
        refusals = server.refusals = server.refusals or delays(*_OVERLOAD_DELAYS_S)
        if server.resumes_at <= now:  # the request did not begin before an earlier refusal
            wait_s = max(next(refusals), error.retry_after_s)
            server.resumes_at = now + wait_s
            asyncio.get_running_loop().call_later(wait_s, self._notify)
            self.recheck(server)
            # The check that follows a first reset finds out whether the server died.
            if not (server.was_overloaded or (error.is_reset and is_first)):
                server.was_overloaded = True
                self._name_overload(server, str(error))
        return server.resumes_at - now

    def sent_tokens(self, server: FleetServer) -> None:
        """Notes that a server works."""
        server.heard_at = asyncio.get_running_loop().time()
        self._refusals = server.refusals = None
        server.was_overloaded = False

    def lose(self, server: FleetServer, reason: str) -> None:
        """Gives a server no work until it has been checked again."""
        if server.session:
            self._name(server, reason, change="lost")
        self._detach(server)
        self._kicks[server.address].set()
        self._notify()

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Returns the logprobs of a text, on which the serving servers agree; excludes those that do not.

        Raises:
            NoServerError: If no server serves, or none until it has answered.
        """
        version, servers = self.version, self.serving
        sessions = [server.session for server in servers]
        results = await gather_in_group([self._try_score(s, token_ids) for s in servers])
        scores = {
            server.address: scored
            for server, session, scored in zip(servers, sessions, results, strict=True)
            if scored is not None and server.session == session
        }
        if not scores or version != self.version:
            raise NoServerError("no server of the fleet scored the text")
        agreeing = {
            address: sum(
                difference(scores_of_server, second) <= self._tolerance
                for second in scores.values()
            )
            for address, scores_of_server in scores.items()
        }
        # With no majority another server decides each time: the trainer's logprobs show which one is right.
        self._num_scored += 1
        addresses = sorted(scores)
        first = self._num_scored % len(addresses)
        reference = max(
            addresses[first:] + addresses[:first], key=lambda address: agreeing[address]
        )
        assert version is not None
        self._canary = _Canary(version, tuple(token_ids), scores[reference])
        for server in servers:
            if (scored := scores.get(server.address)) is not None:
                server.compared = self._canary
                if problem := self._contradiction(server, scored, scores[reference]):
                    self.lose(server, problem)
        return scores[reference]

    async def _keep(self, server: FleetServer) -> None:
        """Attaches a server, checks it, and brings it to the newest weights, again and again."""
        kick = self._kicks[server.address]
        refused = delays(_PROBE_EVERY_S, _MAX_WAIT_S)
        while True:
            kick.clear()
            wait_s = _PROBE_EVERY_S
            try:
                async with self._locks[server.address]:
                    await self._bring_or_ask(server)
                refused = delays(_PROBE_EVERY_S, _MAX_WAIT_S)
            except ServerAwayError as error:
                self._excluded.pop(server.address, None)
                self._name(server, str(error), change="lost")
                if (
                    server.session
                ):  # it attached, so that the failure may have been that of an upload
                    wait_s = next(refused)
                self._detach(server)
            except ServerRefusedError as error:
                self._excluded[server.address] = error
                self._name(server, str(error), change="refused")
                self._detach(server)
                # Each try may send all weights.
                if not isinstance(error, ServerBusyError):
                    wait_s = next(refused)
            self._notify()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await kick.wait()

    async def _watch_engines(self, tasks: TaskGroup) -> None:
        """Probes the engine of each server that sends no token for its running requests."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_PROBE_EVERY_S)
            for server in self.serving:
                if server.num_running and clock() - server.heard_at > _SILENCE_S:
                    tasks.create_task(self._probe_engine(server, server.heard_at))
                    server.heard_at = math.inf

    async def _probe_engine(self, server: FleetServer, heard_at: float) -> None:
        """Loses a server whose engine does not score a text; a long prompt or queue only delays tokens.

        One that answers that it has too much to do may still decode, and keeps its work up to the deadline of
        overloaded servers.
        """
        clock = asyncio.get_running_loop().time
        state = (server.session, server.version)
        next_heard_at: float | None = None
        try:
            await server.score(_PROBE_TEXT)
        except (ServerAwayError, ServerRefusedError) as error:
            silence_s = clock() - heard_at
            if isinstance(error, ServerDeferringError) and silence_s < _OVERLOAD_DEADLINE_S:
                next_heard_at = heard_at
            elif (server.session, server.version) == state:
                reason = f"it sent no token for {silence_s:.0f} s, and its engine scores no text: {error}"
                self.lose(server, reason)
        finally:
            if server.heard_at == math.inf:  # it has sent no token meanwhile
                server.heard_at = clock() if next_heard_at is None else next_heard_at

    async def _bring_or_ask(self, server: FleetServer) -> None:
        """Brings a server to the newest weights, or asks a router for its servers."""
        # Some routers pass on what they do not know themselves, so that a router is asked first.
        servers = None if server.address in self._plain else await server.list_servers()
        if servers is None:
            await self._bring(server)
            # Not before it has attached: what answers may be a proxy whose router has not started.
            self._plain.add(server.address)
            return
        try:
            check_hosts(servers, self._allowed_hosts)
        except ValueError as error:
            raise ServerRefusedError(f"{server.address}: {error}") from error
        if not servers:
            raise ServerAwayError(f"the router {server.address} lists no server")
        self._excluded.pop(server.address, None)
        self._problems.pop(server.address, None)
        if servers != self._routers.get(server.address):
            self._routers[server.address] = servers
            self._report("EngineRouterListed", f"{server.address} lists {', '.join(servers)}")

    async def _bring(self, server: FleetServer) -> None:
        if not server.session:
            await server.attach()
            self._check(server)
            server.is_fit = True
            self._excluded.pop(server.address, None)
            self._notify()
        elif self._weights is None or server.received is not self._weights:
            await server.check()  # a load checks the session, too
        weights = self._weights
        if weights is None:
            return
        if not (server.is_verified and server.serves(weights)):
            if server.received is not weights:
                if isinstance(weights, DirectWeights) and not weights.is_repeatable():
                    return  # the next version reaches this server too
                with UPLOAD_SECONDS.time():
                    await server.upload(weights)
            if weights is not self._weights:
                self._kicks[server.address].set()
                return  # the next version arrived meanwhile
            await server.load(weights)
        await self._compare_canary(server)
        # It may have been lost meanwhile, or be the one that other servers contradict.
        if server.session and not server.is_verified:
            self._began(server)

    async def _compare_canary(self, server: FleetServer) -> None:
        """Compares a server with the others by the canary, once for each canary.

        Raises:
            ServerAwayError: If it does not answer.
            ServerRefusedError: If its logprobs differ.
        """
        canary = self._canary
        if canary is None or canary.version != server.version or server.compared is canary:
            return
        scored = await server.score(canary.token_ids)
        server.compared = canary
        if problem := self._contradiction(server, scored, canary.logprobs):
            raise ServerRefusedError(problem)

    async def _upload(self, server: FleetServer, weights: AnyWeights) -> None:
        async with self._locks[server.address]:
            try:
                with UPLOAD_SECONDS.time():
                    await server.upload(weights)
            except (ServerAwayError, ServerRefusedError) as error:
                self.lose(server, str(error))

    async def _try_score(
        self, server: FleetServer, token_ids: Sequence[int]
    ) -> tuple[float, ...] | None:
        """Returns the logprobs of a text; None if the server is lost before it has answered."""
        session = server.session
        scoring = asyncio.ensure_future(server.score(token_ids))
        try:
            while server.session == session and not scoring.done():
                changing = asyncio.ensure_future(self._change())
                await asyncio.wait({scoring, changing}, return_when=asyncio.FIRST_COMPLETED)
                changing.cancel()
            return scoring.result() if scoring.done() else None
        except (ServerAwayError, ServerRefusedError) as error:
            # A new session of the server is not at fault.
            if server.session == session:
                self.lose(server, str(error))
            return None
        finally:
            scoring.cancel()

    def _contradiction(
        self, server: FleetServer, scored: Sequence[float], logprobs: Sequence[float]
    ) -> str:
        """Returns how the logprobs of the canary differ; empty if they agree."""
        distance = difference(scored, logprobs)
        if distance <= self._tolerance:
            return ""
        return (
            f"{server.address} serves other weights than the fleet: the canary's logprobs differ by "
            f"{distance:.3g} on average, more than {self._tolerance:.3g}"
        )

    def _is_serving(self, server: FleetServer) -> bool:
        return self._weights is not None and server.is_verified and server.serves(self._weights)

    def _choose(self, prefix: Hashable, avoided: Collection[str]) -> FleetServer | None:
        now = asyncio.get_running_loop().time()
        serving = [server for server in self.serving if server.resumes_at <= now]
        servers = [server for server in serving if server.address not in avoided] or serving
        if not servers:
            return None
        idlest = min(servers, key=lambda server: server.num_running)
        near = self._prefixes.get(prefix)
        is_near = near in servers and near.num_running <= idlest.num_running + _SLACK
        best = near if near is not None and is_near else idlest
        self._prefixes[prefix] = best
        self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > _MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return best

    def _detach(self, server: FleetServer) -> None:
        server.detach()
        self._on_lost(server)

    def _began(self, server: FleetServer) -> None:
        server.is_verified = True
        if self._problems.pop(server.address, None) is not None:
            self._report("EngineServerServes", f"{server.address} serves version {server.version}")
            CHANGES.labels("serves").inc()
        self._notify()

    def _name(self, server: FleetServer, reason: str, *, change: str) -> None:
        """Reports a server's problem once, until the server serves again."""
        was_named = server.address in self._problems
        self._problems[server.address] = reason
        if not was_named:
            CHANGES.labels(change).inc()
            logger.warning("a server gets no work", extra={"server": server.address, "why": reason})
            kind = "EngineServerRefused" if change == "refused" else "EngineServerLost"
            self._report(kind, f"{server.address} gets no work: {reason}")

    def _name_overload(self, server: FleetServer, reason: str) -> None:
        CHANGES.labels("overloaded").inc()
        logger.warning("a server is overloaded", extra={"server": server.address, "why": reason})
        self._report("EngineServerOverloaded", f"{server.address} gets work later: {reason}")

    def _notify(self) -> None:
        SERVING.set(len(self.serving))
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def _change(self) -> None:
        await self._changed.wait()
