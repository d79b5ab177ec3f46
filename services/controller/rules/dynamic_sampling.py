"""Decides which groups have no advantages, so that dynamic sampling replaces them. Pure."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.runspec.algorithm import AlgorithmSpec, OverlongSpec
from services.common.runspec.formulas import IdleGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of a group that counts in the group's statistics."""

    reward: float
    num_tokens: int = 0
    """Length of the response; only a penalty for long responses needs it."""
    is_truncated: bool = False
    """True if the response reached its limit."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Terms of the reward by name; only advantages of single terms need them."""


def trains_nothing(
    members: Sequence[Member], algorithm: AlgorithmSpec, *, max_response_tokens: int
) -> bool:
    """Returns True if every token of the group that trains has an advantage of 0.

    Returns False if the advantages do not follow from the group's scores alone.

    Args:
        members: Members of one group, not empty.
        max_response_tokens: Limit of the length, from which long responses are penalized.
    """
    kind = algorithm.advantage_kind.idle_groups
    if kind is None:
        return False
    masks_truncated = algorithm.overlong.mask_truncated
    trained = [not (masks_truncated and member.is_truncated) for member in members]
    if kind == "equal_terms":
        weights = algorithm.arguments_of_advantage["weights"]
        return not any(trained) or not _have_different_terms(members, weights)
    scores = [
        reward + _penalty(member, algorithm.overlong, max_response_tokens)
        for reward, member in zip(_stored(members), members, strict=True)
    ]
    return not _have_advantages(kind, scores, trained)


def _stored(members: Sequence[Member]) -> Sequence[float]:
    """Returns the rewards in the precision in which the trainer receives them."""
    return array("f", (member.reward for member in members))


def _penalty(member: Member, overlong: OverlongSpec, max_tokens: int) -> float:
    """Returns DAPO's penalty for a long response, as :func:`advantages.overlong_penalty` computes it."""
    if not overlong.buffer_tokens:
        return 0.0
    over = (member.num_tokens - (max_tokens - overlong.buffer_tokens)) / overlong.buffer_tokens
    return -min(max(over, 0.0), 1.0) * overlong.penalty


def _have_different_terms(members: Sequence[Member], weights: Mapping[str, float]) -> bool:
    names = [name for name, weight in weights.items() if weight]
    # The trainer reports missing terms.
    return any(len({member.terms.get(name) for member in members}) > 1 for name in names) or any(
        name not in member.terms for name in names for member in members
    )


def _have_advantages(kind: IdleGroups, scores: Sequence[float], trained: Sequence[bool]) -> bool:
    """Returns True if a member that trains has an advantage, which follows from the scores of all."""
    if kind == "no_single_best":
        best = max(scores)
        return len(scores) > 1 and scores.count(best) == 1 and trained[scores.index(best)]
    if kind == "no_success" and sum(scores) <= 0:
        return False
    return any(trained) and min(scores) < max(scores)
