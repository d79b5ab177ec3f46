"""States of evaluations, and their scores: means over prompts, by set and by data source. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from services.common.runspec.trainer import BestSpec
from services.controller.rules.learning import term_means

Reason = Literal["initial", "periodic", "final", "manual"]


class EvaluationState(StrEnum):
    """State of an evaluation.

    ::

        QUEUED -> RUNNING -> OK or TIMEOUT
          |          | ^
          |          v |  the run continues and still serves the version
          |     INTERRUPTED
          v          |
        MISSED <-----+    another version replaced the weights; RUNNING ends so, too, if that happens before
                          the evaluation has its rollouts
    """

    QUEUED = "queued"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    OK = "ok"
    TIMEOUT = "timeout"
    MISSED = "missed"


TRANSITIONS: Mapping[EvaluationState, frozenset[EvaluationState]] = {
    EvaluationState.QUEUED: frozenset(
        {EvaluationState.RUNNING, EvaluationState.INTERRUPTED, EvaluationState.MISSED}
    ),
    EvaluationState.RUNNING: frozenset(
        {
            EvaluationState.OK,
            EvaluationState.TIMEOUT,
            EvaluationState.MISSED,
            EvaluationState.INTERRUPTED,
        }
    ),
    EvaluationState.INTERRUPTED: frozenset({EvaluationState.QUEUED, EvaluationState.MISSED}),
    EvaluationState.OK: frozenset(),
    EvaluationState.TIMEOUT: frozenset(),
    EvaluationState.MISSED: frozenset(),
}
"""States that may follow each state."""


class EvaluationStateError(RuntimeError):
    """Raised for a transition that an evaluation does not allow, which is a bug."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One held-out sample, described by its tags."""

    prompt: str
    """Identifier that all samples of one prompt share."""
    source: str
    """Data source of the prompt."""
    reward: float
    answer: str
    """Normalized answer: equal for equal answers."""
    is_greedy: bool
    terms: str = "{}"
    """Named terms of the reward: a JSON object of numbers."""
    set_name: str = "heldout"
    """Name of the prompt set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of one weight version."""

    version: int
    step: int
    """Step whose weights these are."""
    reason: str
    status: EvaluationState
    num_samples: int
    greedy: float | None
    """Mean reward of greedy responses; None without any."""
    sampled: float | None
    """Mean reward of sampled responses (mean@k); None without any."""
    by_set: dict[str, dict[str, float]]
    """Scores of each set, as in ``by_source``; ``prompts`` counts prompts with a score."""
    by_source: dict[str, dict[str, float]]
    """Scores of each data source. ``greedy`` and ``sampled`` are as above. Of each prompt's k
    sampled responses, averaged over prompts: ``best`` (best@k) is the highest reward, ``maj``
    (maj@k) the reward of the most frequent answer, and ``pass@K`` the probability that one of K
    responses is right. ``reward/NAME`` is the mean of a named term over sampled responses, or
    greedy ones if there are none."""
    seconds: float


@dataclass(slots=True)
class _Part:
    """Samples of one set or source."""

    greedy: list[Scored] = field(default_factory=list)
    sampled: dict[str, list[Scored]] = field(default_factory=lambda: defaultdict(list))
    """Sampled responses by prompt."""

    def add(self, sample: Scored) -> None:
        if sample.is_greedy:
            self.greedy.append(sample)
        else:
            self.sampled[sample.prompt].append(sample)

    @property
    def num_prompts(self) -> int:
        return len({sample.prompt for sample in self.greedy} | self.sampled.keys())

    def means(self, solved_from: float) -> dict[str, float]:
        """Returns all available scores by name."""
        prompts = self.sampled.values()
        scores = {
            "greedy": _mean([sample.reward for sample in self.greedy]),
            "sampled": _mean([mean_reward(samples) for samples in prompts]),
            "best": _mean([max(sample.reward for sample in samples) for samples in prompts]),
            "maj": _mean([majority(samples) for samples in prompts]),
        }
        sampled = [sample for samples in prompts for sample in samples]
        terms = term_means(sample.terms for sample in sampled or self.greedy)
        rates = pass_at_k([_num_solved(samples, solved_from) for samples in prompts])
        return {name: score for name, score in scores.items() if score is not None} | rates | terms


def evaluate(
    samples: Iterable[Scored],
    start: "StartedEvaluation",
    *,
    status: EvaluationState,
    seconds: float,
    solved_from: float = 1.0,
) -> Evaluation:
    """Computes the scores of an evaluation.

    Args:
        samples: All samples that have a reward.
        status: How the evaluation ended.
        solved_from: Min reward of a right response.
    """
    sources: dict[str, _Part] = defaultdict(_Part)
    sets: dict[str, _Part] = defaultdict(_Part)
    for sample in samples:
        sources[sample.source].add(sample)
        sets[sample.set_name].add(sample)
    greedy = [sample.reward for source in sources.values() for sample in source.greedy]
    prompts = [samples for source in sources.values() for samples in source.sampled.values()]
    return Evaluation(
        version=start.version,
        step=start.step,
        reason=start.reason,
        status=status,
        num_samples=len(greedy) + sum(map(len, prompts)),
        greedy=_mean(greedy),
        sampled=_mean([mean_reward(samples) for samples in prompts]),
        by_set={
            name: {"prompts": summary.num_prompts, **summary.means(solved_from)}
            for name, summary in sorted(sets.items())
        },
        by_source={name: source.means(solved_from) for name, source in sources.items()},
        seconds=seconds,
    )


def score_of(evaluation: Evaluation, best: BestSpec) -> float | None:
    """Returns the score by which checkpoints are compared; None if it was not measured."""
    sets = evaluation.by_set
    if best.set is None and len(sets) != 1:
        return {"greedy": evaluation.greedy, "sampled": evaluation.sampled}.get(best.metric)
    name = best.set or next(iter(sets))
    return sets.get(name, {}).get(best.metric)


def mean_reward(samples: Sequence[Scored]) -> float:
    """Returns the mean reward of a prompt's samples; there must be at least one."""
    return sum(sample.reward for sample in samples) / len(samples)


def majority(samples: Sequence[Scored]) -> float:
    """Returns the mean reward of the most frequent answer; ties go to the lowest reward."""
    rewards: Mapping[str, list[float]] = defaultdict(list)
    for sample in samples:
        rewards[sample.answer].append(sample.reward)
    maximum = max(map(len, rewards.values()))
    return min(sum(scores) / maximum for scores in rewards.values() if len(scores) == maximum)


def pass_at_k(solved: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Computes unbiased ``pass@K`` for powers of two and for all samples (Chen et al., arXiv:2107.03374).

    For a prompt with n samples, c of them right, it is ``1 - C(n - c, k) / C(n, k)``; the mean is
    over prompts that have at least k samples.

    Args:
        solved: ``(n, c)`` of each prompt.
    """
    maximum = max((count for count, _ in solved), default=0)
    sizes = (
        sorted({1 << power for power in range(maximum.bit_length())} | {maximum}) if maximum else []
    )
    scores = {}
    for k in sizes:
        chances = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in solved if n >= k]
        scores[f"pass@{k}"] = sum(chances) / len(chances)
    return scores


def _num_solved(samples: Sequence[Scored], solved_from: float) -> tuple[int, int]:
    return len(samples), sum(sample.reward >= solved_from for sample in samples)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class StartedEvaluation:
    """Evaluation of one weight version, which stays pinned until the evaluation is reported."""

    version: int
    step: int
    """Step whose weights these are."""
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Evaluations of a run according to its events."""

    versions: frozenset[int] = frozenset()
    """Weight versions whose evaluation ended."""
    settled_step: int = -1
    """Newest step up to which every due evaluation ended, or was reported as missed; -1 without one."""
    begun: StartedEvaluation | None = None
    """Evaluation that began and did not end; None without one."""
    lost: tuple[StartedEvaluation, ...] = ()
    """Evaluations that began and did not end before a rewind, which lost their weights."""
    served: tuple[tuple[int, int], ...] = ()
    """Versions that were served after ``settled_step``, oldest first, each with its step."""


def is_periodic(version: int, every: int) -> bool:
    """Returns True if a number is a multiple of the period; a resumed run selects the same numbers."""
    return every > 0 and version > 0 and version % every == 0


class EvaluationQueue:
    """The current evaluation, with its state, and the next one."""

    def __init__(self) -> None:
        self.current: StartedEvaluation | None = None
        self.next: StartedEvaluation | None = None
        self.state = EvaluationState.QUEUED
        """State of the current evaluation."""

    def enqueue(self, evaluation: StartedEvaluation) -> StartedEvaluation | None:
        """Queues an evaluation after the current one; returns the evaluation that it replaces.

        A queued evaluation is replaced, unless it is the final one, whose weights are the last.
        """
        replaced = None
        if self.current is None:
            self.current, self.state = evaluation, EvaluationState.QUEUED
        elif self.next is None or self.next.reason != "final":
            replaced, self.next = self.next, evaluation
        return replaced

    def move(self, state: EvaluationState) -> None:
        """Records the new state of the current evaluation.

        Raises:
            EvaluationStateError: If the state cannot follow the current one.
        """
        self.state = checked(self.state, state)

    def finish_current(self) -> None:
        """Removes the current evaluation, which ended, and makes the next one the current one."""
        if TRANSITIONS[self.state]:
            raise EvaluationStateError(f"an evaluation ended in the state {self.state}")
        self.current, self.next = self.next, None
        self.state = EvaluationState.QUEUED


def checked(before: EvaluationState, after: EvaluationState) -> EvaluationState:
    """Returns a state that follows another one.

    Raises:
        EvaluationStateError: If an evaluation cannot change from ``before`` to ``after``.
    """
    if after not in TRANSITIONS[before]:
        raise EvaluationStateError(f"an evaluation cannot change from {before} to {after}")
    return after
