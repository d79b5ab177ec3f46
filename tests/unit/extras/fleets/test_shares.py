"""Shares of an engine, on a simulated engine that decodes one token of each running request per step."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.extras.fleets.shares import (
    CONTEXT_COST,
    FIRST_GUESS,
    MAX_WAITING,
    QueueFullError,
    Ticket,
    TokenShares,
)

_SLOTS = 16
_MAX_TOKENS = 1024
_MAX_CONTEXT = 64


@dataclass
class Load:
    """A run that keeps a number of requests at the engine."""

    name: str
    weight: float
    concurrency: int
    draw_length: Callable[[random.Random], int]
    starts_at: int = 0
    ends_at: int = 1 << 30
    tickets: dict[Ticket, int] = field(default_factory=dict)
    """Tokens that each request still has to sample."""
    num_tokens: int = 0
    latencies: list[int] = field(default_factory=list)
    begun_at: dict[Ticket, int] = field(default_factory=dict)
    yielding: list[Callable[[], None]] = field(default_factory=list)


def _submit(shares: TokenShares, load: Load, length: int, context: int, step: int) -> Ticket:
    ticket = Ticket(load.name, context, _MAX_TOKENS)

    def end() -> None:
        if ticket not in load.tickets:
            return  # its last token was sampled in this step
        # What it has not sampled yet continues as another request, as a segment does.
        length = load.tickets.pop(ticket)
        begun_at = load.begun_at.pop(ticket)
        shares.end(ticket)
        again = _submit(shares, load, length, context + ticket.num_sampled, step)
        load.begun_at[again] = begun_at

    ticket.yield_slot = lambda: load.yielding.append(end)
    load.tickets[ticket] = length
    load.begun_at[ticket] = step
    shares.submit(ticket)
    return ticket


def simulate(
    loads: list[Load],
    *,
    steps: int,
    seed: int,
    slots: int = _SLOTS,
    check: Callable[[TokenShares], None] = lambda shares: None,
) -> dict[str, float]:
    """Decodes one token of each running request in each step; returns what each run was served."""
    shares = TokenShares(slots=slots, capacity_tokens=1 << 30)
    draws = random.Random(seed)
    for step in range(steps):
        for load in loads:
            if load.starts_at == step:
                shares.join(load.name, load.weight)
            if load.starts_at <= step < load.ends_at:
                while len(load.tickets) < load.concurrency:
                    context = draws.randint(8, _MAX_CONTEXT)
                    _submit(shares, load, load.draw_length(draws), context, step)
        for load in loads:
            while load.yielding:
                load.yielding.pop()()
        running = [ticket for account in shares.accounts.values() for ticket in [*account.running]]
        assert len(running) <= slots
        for ticket in running:
            load = next(candidate for candidate in loads if candidate.name == ticket.run)
            shares.record(ticket, 1)
            load.num_tokens += 1
            load.tickets[ticket] -= 1
            if load.tickets[ticket] <= 0:
                del load.tickets[ticket]
                load.latencies.append(step - load.begun_at.pop(ticket))
                shares.end(ticket)
        check(shares)
    return {name: account.cost for name, account in shares.accounts.items()}


_lengths = st.sampled_from(
    [
        lambda draws: draws.randint(10, 30),
        lambda draws: draws.randint(100, 300),
        lambda draws: min(1000, int(draws.expovariate(1 / 80)) + 1),
        lambda draws: 50,
    ]
)


def _max_difference(slots: int, weights: list[float], longest: int) -> float:
    """Bound of the difference between what two busy runs were served, in tokens for a weight of 1.

    It is the tokens that the requests of one run in its share of the slots were charged with and have not
    sampled, and twice the cost of one request of the run with the least weight.
    """
    expected = min(max(2.0 * longest, FIRST_GUESS), _MAX_TOKENS)
    cost = expected + CONTEXT_COST * (_MAX_CONTEXT + longest)
    return slots * expected / sum(weights) + 2 * cost / min(weights)


@given(
    slots=st.integers(1, 33),
    weights=st.lists(st.floats(0.5, 4.0), min_size=2, max_size=4),
    lengths=st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 300)).map(sorted), min_size=4, max_size=4
    ),
    surplus=st.integers(1, 64),
    seed=st.integers(0, 1 << 16),
)
def test_what_busy_runs_were_served_differs_by_a_constant_at_any_time(
    slots: int, weights: list[float], lengths: list[list[int]], surplus: int, seed: int
) -> None:
    # So many requests that one waits at any time, though all that run may end in one step.
    loads = [
        Load(f"run{index}", weight, 2 * slots + surplus, partial(_between, *lengths[index]))
        for index, weight in enumerate(weights)
    ]
    bound = _max_difference(slots, weights, max(longest for _, longest in lengths))

    def check(shares: TokenShares) -> None:
        served = [account.served for account in shares.accounts.values()]
        assert max(served) - min(served) <= bound

    simulate(loads, steps=400, seed=seed, slots=slots, check=check)


def _between(shortest: int, longest: int, draws: random.Random) -> int:
    return draws.randint(shortest, longest)


def test_slots_that_no_weight_divides_are_shared_by_tokens() -> None:
    # Fair are 6.4 and 9.6 of 16 slots; all responses end in the same step.
    loads = [
        Load("small", 1.0, _SLOTS, lambda draws: 50),
        Load("large", 1.5, _SLOTS, lambda draws: 50),
    ]
    served = simulate(loads, steps=3000, seed=0)
    assert served["small"] / sum(served.values()) == pytest.approx(0.4, rel=0.01)


@settings(max_examples=15)
@given(
    weights=st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0]), min_size=2, max_size=4),
    lengths=st.lists(_lengths, min_size=4, max_size=4),
    concurrencies=st.lists(st.integers(_SLOTS, 4 * _SLOTS), min_size=4, max_size=4),
    seed=st.integers(0, 1 << 16),
)
def test_busy_runs_are_served_tokens_in_proportion_to_their_weights(
    weights: list[float],
    lengths: list[Callable[[random.Random], int]],
    concurrencies: list[int],
    seed: int,
) -> None:
    loads = [
        Load(f"run{index}", weight, concurrencies[index], lengths[index])
        for index, weight in enumerate(weights)
    ]
    served = simulate(loads, steps=3000, seed=seed)
    for load in loads:
        share = served[load.name] / sum(served.values()) / (load.weight / sum(weights))
        assert 0.9 <= share <= 1.1


def test_a_flood_delays_the_requests_of_others_by_less_than_a_fifth() -> None:
    def latencies(flood: int) -> list[float]:
        loads = [
            Load("flooding", 1.0, flood, lambda draws: draws.randint(50, 150)),
            *(
                Load(f"run{index}", 1.0, _SLOTS // 4, lambda draws: draws.randint(50, 150))
                for index in range(3)
            ),
        ]
        simulate(loads, steps=3000, seed=0)
        return [sum(load.latencies) / len(load.latencies) for load in loads[1:]]

    for calm, flooded in zip(latencies(_SLOTS // 4), latencies(1000), strict=True):
        assert flooded <= 1.2 * calm


def test_a_run_that_comes_gets_slots_from_one_that_had_all_before_its_responses_end() -> None:
    loads = [
        Load("first", 1.0, 100, lambda draws: 1000),
        Load("second", 1.0, 100, lambda draws: 1000, starts_at=500),
    ]
    simulate(loads, steps=700, seed=0)
    assert loads[1].num_tokens >= 0.8 * 200 * _SLOTS / 2


def test_a_run_that_was_idle_saves_up_nothing() -> None:
    loads = [
        Load("busy", 1.0, 100, lambda draws: 20),
        Load("late", 1.0, 100, lambda draws: 20, starts_at=3000),
    ]
    simulate(loads, steps=3000, seed=0)
    before = loads[0].num_tokens
    loads = [
        Load("busy", 1.0, 100, lambda draws: 20),
        Load("late", 1.0, 100, lambda draws: 20, starts_at=3000),
    ]
    simulate(loads, steps=6000, seed=0)
    assert loads[0].num_tokens - before == pytest.approx(loads[1].num_tokens, rel=0.1)


def test_slots_that_others_do_not_use_go_to_who_asks() -> None:
    loads = [
        Load("small", 1.0, 1, lambda draws: 50),
        Load("large", 1.0, 100, lambda draws: 50),
    ]
    simulate(loads, steps=2000, seed=0)
    assert loads[0].num_tokens + loads[1].num_tokens >= 0.95 * 2000 * _SLOTS


def test_a_request_waits_while_the_cache_is_full() -> None:
    shares = TokenShares(slots=8, capacity_tokens=1000)
    shares.join("run", 1.0)
    tickets = [Ticket("run", 400, 100) for _ in range(3)]
    for ticket in tickets:
        shares.submit(ticket)
    assert len(shares.accounts["run"].running) == 2
    shares.end(tickets[0])
    assert shares.accounts["run"].running == {tickets[1], tickets[2]}


def test_a_queue_is_bounded() -> None:
    shares = TokenShares(slots=1, capacity_tokens=1000)
    shares.join("run", 1.0)
    for _ in range(MAX_WAITING + 1):
        shares.submit(Ticket("run", 1, 1))
    with pytest.raises(QueueFullError, match="'run' wait already"):
        shares.submit(Ticket("run", 1, 1))


def test_an_urgent_request_precedes_others_of_its_run() -> None:
    shares = TokenShares(slots=1, capacity_tokens=1000)
    shares.join("run", 1.0)
    first, second, urgent = (Ticket("run", 1, 1, is_urgent=index == 2) for index in range(3))
    for ticket in (first, second, urgent):
        shares.submit(ticket)
    shares.end(first)
    assert shares.accounts["run"].running == {urgent}


async def test_a_request_whose_client_has_gone_leaves_the_queue() -> None:
    shares = TokenShares(slots=1, capacity_tokens=1000)
    shares.join("run", 1.0)

    async def hold(ticket: Ticket) -> None:
        async with shares.slot(ticket):
            await asyncio.Event().wait()

    tasks = [asyncio.ensure_future(hold(Ticket("run", 1, 1))) for _ in range(2)]
    await asyncio.sleep(0)
    account = shares.accounts["run"]
    assert (len(account.running), len(account.waiting)) == (1, 1)
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert (len(account.running), len(account.waiting)) == (1, 0)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert not account.is_active


def test_an_urgent_request_keeps_its_slot() -> None:
    shares = TokenShares(slots=2, capacity_tokens=10_000)
    yielded: list[str] = []
    for run in ("first", "second"):
        shares.join(run, 1.0)
    canary, sampling = Ticket("first", 1, 100, is_urgent=True), Ticket("first", 1, 100)
    for name, ticket in (("canary", canary), ("sampling", sampling)):
        ticket.yield_slot = partial(yielded.append, name)
        shares.submit(ticket)
    shares.record(sampling, 5)
    for _ in range(2):
        shares.submit(Ticket("second", 1, 10))
    assert yielded == ["sampling"]


def test_a_run_that_may_take_no_slot_does_not_keep_others_from_theirs() -> None:
    shares = TokenShares(slots=4, capacity_tokens=10_000)
    yielded: list[Ticket] = []
    for run in ("ahead", "long", "short"):
        shares.join(run, 1.0)
    for _ in range(4):
        ticket = Ticket("ahead", 1, 40)
        ticket.yield_slot = partial(yielded.append, ticket)
        shares.submit(ticket)
    shares.submit(Ticket("long", 1, 1024))
    assert not yielded
    shares.submit(Ticket("short", 1, 10))
    assert len(yielded) == 1
