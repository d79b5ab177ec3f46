"""The work of one step: mini-batches, ranks and micro-batches, the same plan on every rank."""

from collections.abc import Callable
from dataclasses import dataclass

from services.trainer.batch.packing import balance, micro_batches
from services.trainer.batch.samples import Cohort


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one rank does in a step."""

    rows: tuple[int, ...]
    """The rank's samples, by index in the whole batch."""
    updates: tuple[tuple[tuple[int, ...], ...], ...]
    """For each optimizer update its micro-batches, each a tuple of positions in ``rows``. All ranks
    have the same number of micro-batches; one without work has an empty one."""


def plan_step(
    cohort: Cohort,
    *,
    num_updates: int,
    rank: int,
    num_ranks: int,
    max_tokens: int,
    cost: Callable[[int], float] = float,
) -> StepPlan:
    """Split a batch into updates by whole groups, then over ranks by cost, then by tokens.

    A batch of fewer groups than updates gives one update for each group.

    Args:
        cohort: The whole batch.
        num_updates: Optimizer updates.
        rank: Data-parallel rank whose plan is wanted.
        num_ranks: Data-parallel ranks.
        max_tokens: Token budget of a micro-batch.
        cost: Cost of a sequence by its length.
    """
    num_groups = int(cohort.groups.max()) + 1
    num_updates = min(num_updates, num_groups)
    groups = cohort.groups.tolist()
    rows: list[int] = []
    updates = []
    for update in range(num_updates):
        first = update * num_groups // num_updates
        last = (update + 1) * num_groups // num_updates
        members = [index for index, group in enumerate(groups) if first <= group < last]
        shares = balance([cost(cohort.lengths[index]) for index in members], num_ranks)
        packed = [
            micro_batches([cohort.lengths[members[i]] for i in share], max_tokens)
            for share in shares
        ]
        own = packed[rank]
        start = len(rows)
        rows += [members[i] for i in shares[rank]]
        work = [tuple(start + position for position in micro) for micro in own]
        work += [()] * (max(map(len, packed)) - len(own))
        updates.append(tuple(work))
    return StepPlan(rows=tuple(rows), updates=tuple(updates))
