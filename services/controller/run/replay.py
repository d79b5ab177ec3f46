"""Which finished groups form the next batch: a pure decision from states and versions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.controller.run.groups import Group
from services.controller.run.staleness import StalenessGate


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to do for the next batch."""

    batch: tuple[Group, ...] = ()
    """Groups to train now, oldest admission first; empty if the batch is not complete yet."""
    awaited: tuple[Group, ...] = ()
    """Running groups that must be in this batch, because they would be stale in the next one."""
    stale: tuple[Group, ...] = ()
    """Finished groups that are over the bound already."""


def choose_batch(
    ready: Sequence[Group],
    running: Sequence[Group],
    *,
    gate: StalenessGate,
    trainer_version: int,
    wait_for_due: bool,
    keep_stale: bool,
) -> Choice:
    """Choose the groups of the next batch.

    Groups that are due come first, then the oldest admission: not completion order, which would favour
    short responses.

    Args:
        ready: Finished groups.
        running: Groups that are begun and not finished.
        gate: Bound and batch size.
        trainer_version: Weight version that the batch will be trained from.
        wait_for_due: Whether due groups that still run hold the batch back.
        keep_stale: Whether groups over the bound stay in (their stale tokens are masked).
    """
    stale = tuple(
        group
        for group in ready
        if gate.is_stale(group.oldest_version, trainer_version=trainer_version)
    )
    if stale and not keep_stale:
        return Choice(stale=stale)
    if wait_for_due:
        awaited = tuple(
            group
            for group in running
            if gate.is_due(group.oldest_version, trainer_version=trainer_version)
        )
        if awaited:
            return Choice(awaited=awaited)
    if len(ready) < gate.groups_per_step:
        return Choice()

    def urgency(group: Group) -> tuple[bool, int]:
        due = gate.is_due(group.oldest_version, trainer_version=trainer_version)
        return (not due, group.sequence)

    chosen = sorted(ready, key=urgency)[: gate.groups_per_step]
    return Choice(batch=tuple(sorted(chosen, key=lambda group: group.sequence)))


def resume_key(
    *, is_at_risk: bool, num_unfinished: int, num_tokens: int, sequence: int
) -> tuple[bool, int, int, int]:
    """Where an unfinished group stands among those that wait; the least goes on first.

    Groups that are about to grow stale come first, then those with the least left to do, then those with the
    most done, then the oldest.

    Args:
        is_at_risk: Whether it would be due after one more version.
        num_unfinished: Members that are not finished.
        num_tokens: Tokens generated so far.
        sequence: Order of admission.
    """
    return (not is_at_risk, num_unfinished, -num_tokens, sequence)


def resume_order(
    groups: Iterable[Group], *, gate: StalenessGate, weight_version: int
) -> list[Group]:
    """The order in which waiting groups go on.

    Args:
        groups: Groups that wait for a rollout.
        gate: The bound.
        weight_version: What the rollouts serve.
    """

    def key(group: Group) -> tuple[bool, int, int, int]:
        has_tokens = group.oldest_version >= 0
        return resume_key(
            is_at_risk=has_tokens and gate.is_at_risk(group.oldest_version, weight_version),
            num_unfinished=group.num_unfinished,
            num_tokens=group.num_tokens,
            sequence=group.sequence,
        )

    return sorted(groups, key=key)
