"""Scores of an evaluation: means over prompts, per data source. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.controller.rules.terms import term_means


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
    by_source: dict[str, dict[str, float]]
    """The same two per data source and, of each prompt's k sampled responses, averaged over prompts: ``best``
    (best@k), the highest reward, and ``maj`` (maj@k), the reward of the answer that most of them give.
    ``reward/NAME`` is the mean of a named term over sampled responses, or greedy ones if there are none."""
    seconds: float


@dataclass(slots=True)
class _Source:
    """Samples of one data source."""

    greedy: list[Scored] = field(default_factory=list)
    sampled: dict[str, list[Scored]] = field(default_factory=lambda: defaultdict(list))
    """By prompt."""

    def means(self) -> dict[str, float]:
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
        return {name: score for name, score in scores.items() if score is not None} | terms


def evaluate(
    samples: Iterable[Scored], *, version: int, reason: str, status: str, seconds: float
) -> Evaluation:
    """Score what came of an evaluation.

    Args:
        samples: All samples that have a reward.
        version: Weight version that made them.
        reason: Why it was evaluated.
        status: How the evaluation ended.
        seconds: How long it took.
    """
    sources: dict[str, _Source] = defaultdict(_Source)
    for sample in samples:
        source = sources[sample.source]
        if sample.is_greedy:
            source.greedy.append(sample)
        else:
            source.sampled[sample.prompt].append(sample)
    greedy = [sample.reward for source in sources.values() for sample in source.greedy]
    prompts = [samples for source in sources.values() for samples in source.sampled.values()]
    return Evaluation(
        version=version,
        reason=reason,
        status=status,
        num_samples=len(greedy) + sum(map(len, prompts)),
        greedy=_mean(greedy),
        sampled=_mean([mean_reward(samples) for samples in prompts]),
        by_source={name: source.means() for name, source in sources.items()},
        seconds=seconds,
    )


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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
