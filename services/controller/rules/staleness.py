"""Bounded staleness: when a group may start, and which must be trained now. Pure.

Source of the admission rule: AReaL (arXiv:2505.24298), ``N + 1 <= (v + max_staleness + 1) * B``. It bounds
what is admitted; a long response can still grow older, so batches are checked again when they are formed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.controller.rules.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessGate:
    """The bound of one run."""

    max_staleness: int
    """Most weight versions a sample may lag behind when it is trained."""
    groups_per_step: int
    """Groups in a batch."""

    def capacity(self, *, published: int, num_admitted: int, most: int) -> int:
        """Groups that may start now; not negative.

        Args:
            published: Newest weight version that the rollouts serve.
            num_admitted: Groups admitted so far and not taken back: running, waiting and trained.
            most: Groups that the rollouts have room for.
        """
        bound = (published + self.max_staleness + 1) * self.groups_per_step
        return max(0, min(bound - num_admitted, most))

    def is_stale(self, oldest_version: int, *, trainer_version: int) -> bool:
        """Whether a sample may no longer be trained by the trainer as it is now."""
        return trainer_version - oldest_version > self.max_staleness

    def batches_left(self, oldest_version: int, *, trainer_version: int) -> int:
        """Batches behind the next one that may still have a sample; 0 if the next one must."""
        return max(0, oldest_version + self.max_staleness - trainer_version)

    def is_at_risk(self, oldest_version: int, weight_version: int) -> bool:
        """Whether an unfinished sample would be due after one more version."""
        return weight_version - oldest_version >= self.max_staleness - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """What to do for the next batch."""

    batch: tuple[Group, ...] = ()
    """Groups to train now, oldest admission first; empty if the batch is not complete yet."""
    awaited: tuple[Group, ...] = ()
    """Running groups that must be waited for, because some of them would be stale otherwise."""
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
) -> BatchChoice:
    """Choose the groups of the next batch.

    The oldest come first: not completion order, which would favour short responses. Groups that are faster
    than older ones take their places only as far as the batches behind this one have room for those.

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
        return BatchChoice(stale=stale)
    if len(ready) < gate.groups_per_step:
        return BatchChoice()
    by_age = sorted(ready, key=lambda group: (group.oldest_version, group.sequence))
    chosen, left = by_age[: gate.groups_per_step], by_age[gate.groups_per_step :]
    if wait_for_due:
        overdue = _overdue([*left, *running], gate=gate, trainer_version=trainer_version)
        if awaited := tuple(group for group in running if group.sequence in overdue):
            return BatchChoice(awaited=awaited)
    return BatchChoice(batch=tuple(sorted(chosen, key=lambda group: group.sequence)))


def _overdue(
    groups: Sequence[Group], *, gate: StalenessGate, trainer_version: int
) -> frozenset[int]:
    """Numbers of groups of which some would be stale if a batch were trained without them.

    The batch behind it has room for so many, that and the next for twice as many, and so on: if more have to
    be trained by then, younger groups that were faster have taken their places.
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
