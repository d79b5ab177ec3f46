"""Core of the run API, shared by REST and gRPC: authentication, authorization, dispatch to handlers."""

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from services.common.errors import UnauthenticatedError
from services.controller.api.handlers import Call, Handlers, Items
from services.controller.api.operations import Operation, RunOperation
from services.controller.api.principals import Authenticator, Principal
from services.controller.api.request_limits import AuthRateLimit, RequestLimits
from services.controller.fleets import Fleets, NoFleets
from services.controller.manager.audit import RunAudit
from services.controller.manager.logs import RunLogs
from services.controller.manager.runs import RunManager

# Seconds after which a revoked token is refused.
_CACHE_S = 1.0
_MAX_CACHED = 1000
_LOOKUP_THREADS = 8
# Seconds after which the streams of a revoked token end.
_STREAM_CHECK_S = 5.0
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


def handler_name(operation: type[Operation[Any]]) -> str:
    return _WORD.sub("_", operation.__name__).lower()


class RunApi:
    """Authenticates callers and executes their operations."""

    def __init__(
        self,
        manager: RunManager,
        audit: RunAudit,
        logs: RunLogs,
        users: Authenticator,
        limits: RequestLimits,
        fleets: Fleets | None = None,
    ) -> None:
        self._manager = manager
        self._handlers = Handlers(manager, audit, logs, limits, fleets or NoFleets())
        self._users = users
        self._principals: dict[str, tuple[Principal, float]] = {}
        self._auth_rate_limit = AuthRateLimit()
        self._lookups: dict[str, asyncio.Future[Principal]] = {}
        # Separate threads: the default threads also read files for callers without credentials.
        self._lookup_threads = ThreadPoolExecutor(_LOOKUP_THREADS, "token-lookup")
        self.limits = limits
        """Limits of the callers' requests and streams."""

    async def authenticate(self, authorization: str, peer: str) -> Principal:
        """Returns the principal of an ``Authorization`` header, after its request is admitted.

        Raises:
            UnauthenticatedError: If the token is not known.
            RateLimitedError: If the project sends too many requests, or the peer too many unknown
                tokens.
        """
        who = self._known_principal(authorization)
        if who is None:
            # A known token is exempt from the limit, which other requests from that address may exceed.
            is_known = authorization in self._principals
            slot = nullcontext() if is_known else self._auth_rate_limit.limit_lookups(peer)
            try:
                async with slot:
                    # Another request with this token may have been looked up in the meantime.
                    who = self._known_principal(authorization)
                    if who is None:
                        who = await self._look_up(authorization)
                        self._remember(authorization, who)
            except UnauthenticatedError:
                self._principals.pop(authorization, None)
                raise
        await self.limits.admit(who.project)
        return who

    def _known_principal(self, authorization: str) -> Principal | None:
        who, deadline = self._principals.get(authorization, (None, 0.0))
        return who if time.monotonic() <= deadline else None

    def _remember(self, authorization: str, who: Principal) -> None:
        if len(self._principals) >= _MAX_CACHED:
            self._principals.clear()
        self._principals[authorization] = (who, time.monotonic() + _CACHE_S)

    async def check_valid(self, who: Principal) -> None:
        """Checks that a principal of an earlier request is still known.

        Raises:
            UnauthenticatedError: If its token has been revoked or has expired.
        """
        await self._look_up(who.authorization)

    async def _look_up(self, authorization: str) -> Principal:
        """Authenticates in a thread; concurrent requests with one token share one lookup."""
        lookup = self._lookups.get(authorization)
        if lookup is None:
            lookup = asyncio.get_running_loop().run_in_executor(
                self._lookup_threads, self._users.authenticate, authorization
            )
            self._lookups[authorization] = lookup
            lookup.add_done_callback(lambda _: self._lookups.pop(authorization))
        return replace(await asyncio.shield(lookup), authorization=authorization)

    async def answer(self, who: Principal, operation: Operation[Any]) -> tuple[Any, Call]:
        """Executes an operation, after checking that its caller has the required role."""
        call = Call(who)
        if isinstance(operation, RunOperation):
            # Checked before the role: a run of another project appears not to exist to any role.
            call = Call(who, who.require_run(await self._manager.get(operation.run_id)))
        who.require_role(operation.role)
        handler = getattr(self._handlers, handler_name(type(operation)))
        answer = await handler(call, operation)
        if operation.form == "events":
            answer = self._end_when_invalid(who, answer)
        return answer, call

    async def _end_when_invalid(self, who: Principal, items: Items) -> Items:
        """Ends a stream when the token of its caller becomes invalid."""
        checked_at = time.monotonic()
        async for batch in items:
            if time.monotonic() - checked_at > _STREAM_CHECK_S:
                try:
                    await self.check_valid(who)
                except UnauthenticatedError:
                    return
                checked_at = time.monotonic()
            yield batch
