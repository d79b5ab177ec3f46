"""Scores of an evaluation: means over prompts, by set and by data source. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.common.runspec.trainer import BestSpec
from services.controller.rules.statistics import term_means


@dataclass(frozen=True, slots=True)
class Scored:
    """One held-out sample as its tags tell of it."""

    prompt: str
    """What it answers: samples of one prompt have this in common."""
    source: str
    """Origin of the prompt."""
    reward: float
    answer: str
    """Equal for equal answers."""
    is_greedy: bool
    terms: str = "{}"
    """Named terms of the reward: a JSON object of numbers."""
    set_name: str = "heldout"
    """The set of prompts that it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Scores of one weight version."""

    version: int
    reason: str
    status: str
    num_samples: int
    greedy: float | None
    """Mean reward of greedy responses; None without any."""
    sampled: float | None
    """Mean reward of sampled responses (mean@k); None without any."""
    by_set: dict[str, dict[str, float]]
    """Scores of each set, as of each source; ``prompts`` counts those that have a score."""
    by_source: dict[str, dict[str, float]]
    """The same two per data source and, of each prompt's k sampled responses, averaged over prompts: ``best``
    (best@k), the highest reward, ``maj`` (maj@k), the reward of the answer that most of them give, and
    ``pass@K``, the chance that one of K responses is right. ``reward/NAME`` is the mean of a named term over
    sampled responses, or greedy ones if there are none."""
    seconds: float


@dataclass(slots=True)
class _Part:
    """Samples of one set or source."""

    greedy: list[Scored] = field(default_factory=list)
    sampled: dict[str, list[Scored]] = field(default_factory=lambda: defaultdict(list))
    """By prompt."""

    def add(self, sample: Scored) -> None:
        """Take in a sample."""
        if sample.is_greedy:
            self.greedy.append(sample)
        else:
            self.sampled[sample.prompt].append(sample)

    @property
    def num_prompts(self) -> int:
        """Prompts with a sample."""
        return len({sample.prompt for sample in self.greedy} | self.sampled.keys())

    def means(self, solved_from: float) -> dict[str, float]:
        """Every score that there is, by name."""
        prompts = self.sampled.values()
        scores = {
            "greedy": _mean([sample.reward for sample in self.greedy]),
            "sampled": _mean([mean_reward(samples) for samples in prompts]),
            "best": _mean([max(sample.reward for sample in samples) for samples in prompts]),
            "maj": _mean([majority(samples) for samples in prompts]),
        }
        sampled = [sample for samples in prompts for sample in samples]
        terms = term_means(sample.terms for sample in sampled or self.greedy)
        passed = pass_at_k([_num_solved(samples, solved_from) for samples in prompts])
        return {name: score for name, score in scores.items() if score is not None} | passed | terms


def evaluate(
    samples: Iterable[Scored],
    *,
    version: int,
    reason: str,
    status: str,
    seconds: float,
    solved_from: float = 1.0,
) -> Evaluation:
    """Score what came of an evaluation.

    Args:
        samples: All samples that have a reward.
        version: Weight version that made them.
        reason: Why it was evaluated.
        status: How the evaluation ended.
        seconds: How long it took.
        solved_from: Reward from which a response counts as right.
    """
    sources: dict[str, _Part] = defaultdict(_Part)
    sets: dict[str, _Part] = defaultdict(_Part)
    for sample in samples:
        sources[sample.source].add(sample)
        sets[sample.set_name].add(sample)
    greedy = [sample.reward for source in sources.values() for sample in source.greedy]
    prompts = [samples for source in sources.values() for samples in source.sampled.values()]
    return Evaluation(
        version=version,
        reason=reason,
        status=status,
        num_samples=len(greedy) + sum(map(len, prompts)),
        greedy=_mean(greedy),
        sampled=_mean([mean_reward(samples) for samples in prompts]),
        by_set={
            name: {"prompts": part.num_prompts, **part.means(solved_from)}
            for name, part in sorted(sets.items())
        },
        by_source={name: source.means(solved_from) for name, source in sources.items()},
        seconds=seconds,
    )


def score_of(evaluation: Evaluation, best: BestSpec) -> float | None:
    """The score by which versions are compared; None if it was not measured."""
    sets = evaluation.by_set
    if best.set is None and len(sets) != 1:
        return {"greedy": evaluation.greedy, "sampled": evaluation.sampled}.get(best.metric)
    name = best.set or next(iter(sets))
    return sets.get(name, {}).get(best.metric)


def mean_reward(samples: Sequence[Scored]) -> float:
    """Mean reward of a prompt's samples, of which there is at least one."""
    return sum(sample.reward for sample in samples) / len(samples)


def majority(samples: Sequence[Scored]) -> float:
    """Mean reward of the most frequent answer; of equally frequent ones, the one that is worth least."""
    rewards: Mapping[str, list[float]] = defaultdict(list)
    for sample in samples:
        rewards[sample.answer].append(sample.reward)
    most = max(map(len, rewards.values()))
    return min(sum(found) / most for found in rewards.values() if len(found) == most)


def pass_at_k(solved: Sequence[tuple[int, int]]) -> dict[str, float]:
    """``pass@K`` for powers of two and for all samples, unbiased (Chen et al., arXiv:2107.03374).

    Of a prompt with n samples, c of them right, it is ``1 - C(n - c, k) / C(n, k)``; the mean is over prompts
    that have k samples.

    Args:
        solved: ``(n, c)`` of each prompt.
    """
    most = max((count for count, _ in solved), default=0)
    sizes = sorted({1 << power for power in range(most.bit_length())} | {most}) if most else []
    scores = {}
    for k in sizes:
        chances = [1 - math.comb(n - c, k) / math.comb(n, k) for n, c in solved if n >= k]
        scores[f"pass@{k}"] = sum(chances) / len(chances)
    return scores


def _num_solved(samples: Sequence[Scored], solved_from: float) -> tuple[int, int]:
    return len(samples), sum(sample.reward >= solved_from for sample in samples)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


Reason = Literal["initial", "periodic", "final", "manual"]
Status = Literal["ok", "timeout", "missed"]


@dataclass(frozen=True, slots=True)
class BegunEvaluation:
    """An evaluation of one weight version, which is pinned from here to its report."""

    version: int
    reason: Reason


def is_periodic(version: int, every: int) -> bool:
    """Whether a version is evaluated because of its number: a resumed run picks the same ones."""
    return every > 0 and version > 0 and version % every == 0


class EvaluationQueue:
    """The evaluation that has its turn, and the one behind it."""

    def __init__(self) -> None:
        self.current: BegunEvaluation | None = None
        self.next: BegunEvaluation | None = None

    def ask(self, evaluation: BegunEvaluation) -> None:
        """Have an evaluation made, now or behind the current one."""
        if self.current is None:
            self.current = evaluation
        elif self.next is None or self.next.reason != "final":
            self.next = evaluation

    def end(self) -> None:
        """The current one is reported."""
        self.current, self.next = self.next, None
