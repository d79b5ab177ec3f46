"""Bounds staleness: decides when groups may start and which must be trained next. Pure.

The admission rule is from AReaL (arXiv:2505.24298): ``N + 1 <= (v + max_staleness + 1) * B``. It bounds
admission only; a long response can still grow older, so batches are checked again when they are formed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.controller.rules.ledger import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessGate:
    """Staleness bound of one run."""

    max_staleness: int
    """Max number of weight versions between the trainer and a sample's oldest token."""
    groups_per_step: int
    """Number of groups in a batch."""

    def capacity(self, *, published: int, num_admitted: int, max_groups: int) -> int:
        """Returns how many groups may start now; not negative.

        Args:
            published: Newest weight version that the rollouts serve.
            num_admitted: Admitted groups that were not dropped or quarantined: running, waiting and
                trained.
            max_groups: Groups for which the rollouts have slots.
        """
        bound = (published + self.max_staleness + 1) * self.groups_per_step
        return max(0, min(bound - num_admitted, max_groups))

    def is_stale(self, oldest_version: int, *, trainer_version: int) -> bool:
        """Returns True if a sample is over the bound at the trainer's current version."""
        return trainer_version - oldest_version > self.max_staleness

    def batches_left(self, oldest_version: int, *, trainer_version: int) -> int:
        """Returns how many batches after the next one may still train a sample; 0 if the next one must."""
        return max(0, oldest_version + self.max_staleness - trainer_version)

    def is_at_risk(self, oldest_version: int, weight_version: int) -> bool:
        """Returns True if an unfinished sample would be due after one more version."""
        return weight_version - oldest_version >= self.max_staleness - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """Decision about the next batch."""

    batch: tuple[Group, ...] = ()
    """Groups to train now, in order of admission; empty if the batch is not complete yet."""
    awaited: tuple[Group, ...] = ()
    """Running groups to wait for, because some of them would become stale otherwise."""
    stale: tuple[Group, ...] = ()
    """Finished groups that are over the bound."""


def choose_batch(
    ready_groups: Sequence[Group],
    running: Sequence[Group],
    *,
    gate: StalenessGate,
    trainer_version: int,
    wait_for_due: bool,
    keep_stale: bool,
) -> BatchChoice:
    """Chooses the groups of the next batch.

    Groups with the oldest weight versions come first; order of completion would favor short
    responses. Finished newer groups take precedence over running older ones only as far as later
    batches have room for the older ones.

    Args:
        running: Groups that are started and not finished.
        trainer_version: Weight version that the batch will be trained from.
        wait_for_due: True if the batch waits for running groups that are due.
        keep_stale: True if groups over the bound stay in the batch, with their stale tokens masked.
    """
    stale = tuple(
        group
        for group in ready_groups
        if gate.is_stale(group.oldest_version, trainer_version=trainer_version)
    )
    if stale and not keep_stale:
        return BatchChoice(stale=stale)
    if len(ready_groups) < gate.groups_per_step:
        return BatchChoice()
    by_age = sorted(ready_groups, key=lambda group: (group.oldest_version, group.sequence))
    groups, remaining = by_age[: gate.groups_per_step], by_age[gate.groups_per_step :]
    if wait_for_due:
        overdue = _overdue([*remaining, *running], gate=gate, trainer_version=trainer_version)
        if awaited := tuple(group for group in running if group.sequence in overdue):
            return BatchChoice(awaited=awaited)
    return BatchChoice(batch=tuple(sorted(groups, key=lambda group: group.sequence)))


def _overdue(
    groups: Sequence[Group], *, gate: StalenessGate, trainer_version: int
) -> frozenset[int]:
    """Returns sequence numbers of groups that must train next, because some would be stale later.

    The next ``n`` steps train at most ``n`` batches. If more groups than that must train within ``n``
    steps, some of them must train now.
    """
    by_age = sorted(groups, key=lambda group: group.oldest_version)
    for index, group in reversed([*enumerate(by_age)]):
        batches = gate.batches_left(group.oldest_version, trainer_version=trainer_version)
        if index >= batches * gate.groups_per_step:
            return frozenset(group.sequence for group in by_age[: index + 1])
    return frozenset()


def resume_key(
    *, is_at_risk: bool, num_unfinished: int, num_tokens: int, sequence: int
) -> tuple[bool, int, int, int]:
    """Returns the sort key of an unfinished group that waits; the smallest key resumes first.

    Groups that are about to become stale come first, then those with the fewest unfinished members,
    then those with the most tokens, then the oldest.

    Args:
        is_at_risk: True if the group would be due after one more version.
        num_tokens: Number of tokens generated so far.
    """
    return (not is_at_risk, num_unfinished, -num_tokens, sequence)


def resume_order(
    groups: Iterable[Group], *, gate: StalenessGate, weight_version: int
) -> list[Group]:
    """Sorts waiting groups in the order in which they resume.

    Args:
        weight_version: Newest version that the rollouts serve.
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
