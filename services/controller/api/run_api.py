"""Core of the run API, shared by REST and gRPC: authentication, authorization, dispatch to handlers."""

import re
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool

from services.common.errors import UnauthenticatedError
from services.controller.api.handlers import Call, Handlers, Items
from services.controller.api.operations import Operation, RunOperation
from services.controller.api.principals import Authenticator, Principal
from services.controller.api.request_limits import AuthRateLimit, RequestLimits
from services.controller.manager.audit import RunAudit
from services.controller.manager.logs import RunLogs
from services.controller.manager.runs import RunManager

# Seconds after which a revoked token is refused.
_CACHE_S = 1.0
_MAX_CACHED = 1000
# Seconds after which the streams of a revoked token end.
_STREAM_CHECK_S = 5.0
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


def handler_name(operation: type[Operation[Any]]) -> str:
    """Returns the name of an operation's handler: ``pause_run`` for ``PauseRun``."""
    return _WORD.sub("_", operation.__name__).lower()


class RunApi:
    """Authenticates callers and executes their operations.

    Args:
        manager: Manager of the runs.
        audit: Reads the history of runs.
        logs: Reads the logs of workers.
        users: Authenticates callers.
        limits: Limits the requests of projects.
    """

    def __init__(
        self,
        manager: RunManager,
        audit: RunAudit,
        logs: RunLogs,
        users: Authenticator,
        limits: RequestLimits,
    ) -> None:
        self._manager = manager
        self._handlers = Handlers(manager, audit, logs, limits)
        self._users = users
        self._known: dict[str, tuple[Principal, float]] = {}
        self._auth_rate_limit = AuthRateLimit()
        self.limits = limits
        """Limits of the callers' requests and streams."""

    async def authenticate(self, authorization: str, peer: str) -> Principal:
        """Returns the principal of an ``Authorization`` header, after its request is admitted.

        Args:
            authorization: The header.
            peer: Address of the caller.

        Raises:
            UnauthenticatedError: If the token is not known.
            RateLimitedError: If the project sends too many requests, or the peer too many unknown
                tokens.
        """
        now = time.monotonic()
        who, deadline = self._known.get(authorization, (None, 0.0))
        if who is None or deadline < now:
            # A token known before does not count, whatever others send from that address.
            is_unknown = who is None
            if is_unknown:
                self._auth_rate_limit.admit(peer)
            try:
                async with self._auth_rate_limit.lookup() if is_unknown else nullcontext():
                    who = await run_in_threadpool(self._users.authenticate, authorization)
            except UnauthenticatedError:
                self._known.pop(authorization, None)
                raise
            if is_unknown:
                self._auth_rate_limit.refund(peer)
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            who = replace(who, authorization=authorization)
            self._known[authorization] = (who, now + _CACHE_S)
        await self.limits.admit(who.project)
        return who

    async def check_valid(self, who: Principal) -> None:
        """Checks that a principal of an earlier request is still known.

        Raises:
            UnauthenticatedError: If its token has been revoked or has expired.
        """
        await run_in_threadpool(self._users.authenticate, who.authorization)

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
        seen = time.monotonic()
        async for some in items:
            if time.monotonic() - seen > _STREAM_CHECK_S:
                try:
                    await self.check_valid(who)
                except UnauthenticatedError:
                    return
                seen = time.monotonic()
            yield some
