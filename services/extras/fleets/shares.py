"""Admits the requests of several runs to one engine, so that each run gets its share of the tokens.

Each run has an account of the tokens that it was served, divided by its weight. The next request is one of
the run with the lowest account (virtual token counters: Sheng et al., "Fairness in serving large language
models", OSDI 2024). The length of a response is not known before its end, so an account is charged with the
run's mean response at admission, and corrected as tokens arrive and when the response ends.

A run that returns after a pause starts at the lowest of what the others were served: it saves up nothing. If
it has less than its share of the slots, and another run has more and is ahead in tokens, the youngest
requests of that run are asked to yield; they continue later from their last token. Shares of the slots are
rounded up for this: runs have a fraction of a slot by turns, as tokens decide.

While runs always have waiting requests, what they were served, divided by their weights, differs by a
constant: the tokens of the longest responses in one run's slots, and two requests. Shares are therefore
within 10 % after some ten of the longest responses in each slot.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

CONTEXT_COST: Final = 0.1
"""Cost of a token of the context, in sampled tokens: contexts are computed in parallel, or cached."""
MAX_WAITING: Final = 4096
"""Requests of one run that may wait."""
FIRST_GUESS: Final = 128.0
"""Length of a run's first responses, in tokens, as long as none has ended."""
_MEMORY: Final = 0.1
"""Part of a run's mean length that each response that ends replaces."""


class QueueFullError(RuntimeError):
    """A run has too many waiting requests."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request of a run."""

    run: str
    context_tokens: int
    max_tokens: int
    is_urgent: bool = False
    """True if it is served before other requests of its run."""
    num_sampled: int = 0
    is_yielding: bool = False
    """True if it was asked to end, so that another run gets its slot."""
    expected_tokens: float = 0.0
    """Tokens of the response that the account was charged with at admission."""
    admitted: asyncio.Future[None] | None = None
    yield_slot: Callable[[], None] = lambda: None

    @property
    def can_yield(self) -> bool:
        """True if the request runs to its end unless it is asked to yield."""
        return not (self.is_yielding or self.is_urgent)

    @property
    def unsampled(self) -> float:
        """Tokens that were charged and are not sampled."""
        return max(self.expected_tokens - self.num_sampled, 0.0)

    @property
    def tokens(self) -> float:
        """Tokens that the request holds in the cache, or is expected to hold."""
        return self.context_tokens + max(self.expected_tokens, self.num_sampled)


@dataclass(slots=True)
class Account:
    """Tokens that one run was served."""

    weight: float
    charged: float = 0.0
    """Tokens divided by the weight; it only orders accounts."""
    num_tokens: int = 0
    """Sampled tokens since the run joined."""
    num_context_tokens: int = 0
    """Tokens of the contexts of its requests, also of those that continue after they yielded."""
    num_requests: int = 0
    """Requests that have been admitted since the run joined."""
    mean_response: float = FIRST_GUESS
    waiting: deque[Ticket] = field(default_factory=deque)
    running: set[Ticket] = field(default_factory=set)

    @property
    def cost(self) -> float:
        """Service that the run got, in sampled tokens."""
        return self.num_tokens + CONTEXT_COST * self.num_context_tokens

    @property
    def is_active(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def served(self) -> float:
        """The charge without tokens that running requests have not sampled yet."""
        return self.charged - sum(ticket.unsampled for ticket in self.running) / self.weight

    @property
    def num_yielding(self) -> int:
        return sum(ticket.is_yielding for ticket in self.running)


class TokenShares:
    """Queue of all runs of one engine.

    Args:
        slots: Requests that the engine decodes at once.
        capacity_tokens: Tokens that its cache holds.
    """

    def __init__(self, *, slots: int, capacity_tokens: int) -> None:
        self._slots = max(1, slots)
        self._capacity_tokens = capacity_tokens
        self._accounts: dict[str, Account] = {}
        self._floor = 0.0
        """Service of the run that was served least, at the last admission."""

    @property
    def accounts(self) -> dict[str, Account]:
        """Accounts by run."""
        return dict(self._accounts)

    def join(self, run: str, weight: float) -> None:
        """Opens the account of a run, or changes its weight."""
        if run in self._accounts:
            self._accounts[run].weight = weight
        else:
            self._accounts[run] = Account(weight, self._floor)

    def leave(self, run: str) -> None:
        """Closes an account; its waiting requests are cancelled, its running ones asked to yield."""
        account = self._accounts.pop(run, None)
        if account is None:
            return
        for ticket in account.waiting:
            if ticket.admitted is not None:
                ticket.admitted.cancel()
        for ticket in account.running:
            ticket.is_yielding = True
            ticket.yield_slot()
        self.admit()

    @asynccontextmanager
    async def slot(self, ticket: Ticket) -> AsyncIterator[None]:
        """Waits for a slot of the engine, and holds it while the block runs.

        Raises:
            QueueFullError: If too many requests of the run wait.
        """
        ticket.admitted = asyncio.get_running_loop().create_future()
        self.submit(ticket)
        try:
            await ticket.admitted
            yield
        finally:
            self.end(ticket)

    def submit(self, ticket: Ticket) -> None:
        """Lets a request wait for a slot.

        Raises:
            QueueFullError: If too many requests of the run wait.
        """
        account = self._accounts[ticket.run]
        if len(account.waiting) >= MAX_WAITING:
            raise QueueFullError(f"{MAX_WAITING} requests of run {ticket.run!r} wait already")
        if not account.is_active:
            active = [account.served for account in self._accounts.values() if account.is_active]
            account.charged = max(account.charged, min(active, default=self._floor))
        if ticket.is_urgent:
            account.waiting.appendleft(ticket)
        else:
            account.waiting.append(ticket)
        self.admit()

    def record(self, ticket: Ticket, number: int) -> None:
        """Counts sampled tokens of a request that runs."""
        account = self._accounts.get(ticket.run)
        ticket.num_sampled += number
        if account is None or ticket not in account.running:
            return
        account.num_tokens += number
        if ticket.num_sampled > ticket.expected_tokens:
            # A response that is longer than expected is expected to become twice as long as it is.
            longer = max(min(2 * ticket.num_sampled, ticket.max_tokens), ticket.num_sampled)
            account.charged += (longer - ticket.expected_tokens) / account.weight
            ticket.expected_tokens = longer
            self._preempt()

    def end(self, ticket: Ticket) -> None:
        """Frees the slot of a request, or takes it out of the queue; does nothing the second time."""
        account = self._accounts.get(ticket.run)
        if account is None:
            self.admit()
            return
        if ticket in account.running:
            account.running.discard(ticket)
            account.charged -= ticket.unsampled / account.weight
            if not ticket.is_yielding:
                change = ticket.num_sampled - account.mean_response
                account.mean_response = max(account.mean_response + _MEMORY * change, 1.0)
        elif ticket in account.waiting:
            account.waiting.remove(ticket)
        self.admit()

    def admit(self) -> None:
        """Admits requests while the engine has slots; otherwise asks requests to yield."""
        while (account := self._next()) is not None:
            ticket = account.waiting[0]
            ticket.expected_tokens = self._expected(account, ticket)
            if not self._has_room(ticket):
                break
            account.waiting.popleft()
            if ticket.admitted is not None and ticket.admitted.done():
                continue  # its caller was cancelled
            self._floor = max(self._floor, account.served)
            cost = ticket.expected_tokens + CONTEXT_COST * ticket.context_tokens
            account.charged += cost / account.weight
            account.num_requests += 1
            account.num_context_tokens += ticket.context_tokens
            account.running.add(ticket)
            if ticket.admitted is not None:
                ticket.admitted.set_result(None)
        self._preempt()

    def _expected(self, account: Account, ticket: Ticket) -> float:
        return min(account.mean_response, ticket.max_tokens)

    def _running(self) -> Iterator[Ticket]:
        return (ticket for account in self._accounts.values() for ticket in account.running)

    def _has_room(self, ticket: Ticket) -> bool:
        running = [*self._running()]
        if not running:
            return True  # a request that no cache holds ends with the engine's own error
        running_tokens = sum(request.tokens for request in running)
        return (
            len(running) < self._slots and running_tokens + ticket.tokens <= self._capacity_tokens
        )

    def _next(self) -> Account | None:
        waiting = [account for account in self._accounts.values() if account.waiting]
        return min(waiting, key=lambda account: account.charged, default=None)

    def _preempt(self) -> None:
        """Asks requests of runs above their share of the slots to yield to runs below theirs."""
        active = [account for account in self._accounts.values() if account.is_active]
        weights = sum(account.weight for account in active)
        pending = sum(account.num_yielding for account in active)
        for account in active:
            fair = math.ceil(self._slots * account.weight / weights)
            num_tickets = min(len(account.waiting), fair - len(account.running))
            for _ in range(num_tickets):
                if pending > 0:
                    pending -= 1
                elif not self._ask_to_yield(account, active, weights):
                    break

    def _ask_to_yield(self, account: Account, active: list[Account], weights: float) -> bool:
        """Asks one request of the run that is furthest ahead; returns False if there is none.

        The run must stay ahead nevertheless, so that its slot goes to the account and does not come back.
        Urgent requests keep their slots: they are short, and cannot continue later.
        """
        first = account.waiting[0]
        cost = self._expected(account, first) + CONTEXT_COST * first.context_tokens
        above = [
            candidate
            for candidate in active
            if len(candidate.running) - candidate.num_yielding
            > self._slots * candidate.weight / weights
            and any(ticket.can_yield for ticket in candidate.running)
        ]
        ahead = max(above, key=lambda candidate: candidate.charged, default=None)
        if ahead is None:
            return False
        youngest = min(
            (ticket for ticket in ahead.running if ticket.can_yield),
            key=lambda ticket: ticket.num_sampled,
        )
        after = ahead.charged - youngest.unsampled / ahead.weight
        if after < account.charged + cost / account.weight:
            return False
        youngest.is_yielding = True
        youngest.yield_slot()
        return True
