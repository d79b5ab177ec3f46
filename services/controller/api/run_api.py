"""The run API behind both of its faces: who calls, what they may, and what they are answered."""

import re
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool

from services.common.errors import UnauthenticatedError
from services.controller.api.auth_rate_limit import AuthRateLimit
from services.controller.api.handlers import Call, Handlers, Items
from services.controller.api.operations import OfRun, Operation
from services.controller.api.principals import Authenticator, Principal
from services.controller.api.request_limits import RequestLimits
from services.controller.manager.audit import RunAudit
from services.controller.manager.logs import RunLogs
from services.controller.manager.runs import RunManager

# A token that is revoked is refused this much later.
_KNOWN_FOR_S = 1.0
_MAX_KNOWN = 1000
# And its streams are ended this much later.
_STREAMS_KNOWN_FOR_S = 5.0
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


def handler_name(operation: type[Operation[Any]]) -> str:
    """Name of the method that answers an operation: ``pause_run`` for ``PauseRun``."""
    return _WORD.sub("_", operation.__name__).lower()


class RunApi:
    """Answers operations.

    Args:
        manager: The runs.
        audit: What they did.
        logs: What their workers wrote.
        users: Knows who asks.
        limits: How much they may ask.
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
        """How much callers may ask."""

    async def authenticate(self, authorization: str, peer: str) -> Principal:
        """The principal of an ``Authorization`` header, whose request is admitted.

        Args:
            authorization: The header.
            peer: Where it comes from.

        Raises:
            UnauthenticatedError: If nobody knows it.
            RateLimitedError: If its project sends too many, or its peer too many that nobody knows.
        """
        now = time.monotonic()
        who, deadline = self._known.get(authorization, (None, 0.0))
        if who is None or deadline < now:
            is_stranger = who is None  # one that was known is none, whoever else comes from there
            if is_stranger:
                self._auth_rate_limit.admit(peer)
            try:
                async with self._auth_rate_limit.lookup() if is_stranger else nullcontext():
                    who = await run_in_threadpool(self._users.authenticate, authorization)
            except UnauthenticatedError:
                self._known.pop(authorization, None)
                raise
            if is_stranger:
                self._auth_rate_limit.forgive(peer)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            who = replace(who, authorization=authorization)
            self._known[authorization] = (who, now + _KNOWN_FOR_S)
        await self.limits.admit(who.project)
        return who

    async def recognize(self, who: Principal) -> None:
        """See that a principal of an earlier request is still known.

        Raises:
            UnauthenticatedError: If its token has ended meanwhile.
        """
        await run_in_threadpool(self._users.authenticate, who.authorization)

    async def answer(self, who: Principal, operation: Operation[Any]) -> tuple[Any, Call]:
        """What an operation answers, once its caller is seen to have the role for it."""
        call = Call(who)
        if isinstance(operation, OfRun):
            # A run of another project does not exist, whatever the role.
            call = Call(who, who.demand_run(await self._manager.get(operation.run_id)))
        who.demand(operation.role)
        handler = getattr(self._handlers, handler_name(type(operation)))
        answer = await handler(call, operation)
        if operation.form == "events":
            answer = self._while_known(who, answer)
        return answer, call

    async def _while_known(self, who: Principal, items: Items) -> Items:
        """A stream that ends with the token that it was asked for with."""
        seen = time.monotonic()
        async for some in items:
            if time.monotonic() - seen > _STREAMS_KNOWN_FOR_S:
                try:
                    await self.recognize(who)
                except UnauthenticatedError:
                    return
                seen = time.monotonic()
            yield some
