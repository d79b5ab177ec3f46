"""What a run is predicted to be like, beside what no run can be better than."""

from dataclasses import dataclass

from services.controller.planning.rates import Rates, Setting, together


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a run would be like."""

    step_s: float
    samples_per_s: float
    limit_s: float
    """What a step takes at least: the trainer's work or the engines' at their best, whichever is longer."""
    train_s: float
    """The trainer's work in a step."""
    waits: dict[str, float]
    """Seconds of a step in which the trainer waits, by reason, as a run names them."""
    rollout_idle: float
    """Part of the time in which an engine decodes nothing."""
    places_used: float
    """Part of the engines' places that is taken, on average."""
    staleness_mean: float
    staleness_p95: int

    @property
    def trainer_idle(self) -> float:
        """Part of the time in which the trainer waits."""
        return sum(self.waits.values()) / self.step_s

    @property
    def share_of_limit(self) -> float:
        """What a step would take at least, of what it takes; 1 is the best."""
        return min(1.0, self.limit_s / self.step_s)


def least_step_s(rates: Rates, setting: Setting) -> float:
    """What a step takes at least: ``max(T_train, tokens / R)``; of rollouts in turns ``T_train`` is lost."""
    tokens = setting.samples_per_step * rates.lengths.mean()
    made_s = tokens * rates.decode(setting.places) / setting.places / setting.rollouts
    trained_s = work_s(rates, setting, tokens) + rates.step_s
    if setting.takes_turns:
        trained_s += rates.handover_s
    return max(trained_s, made_s + trained_s * setting.in_turns / setting.rollouts)


def work_s(rates: Rates, setting: Setting, tokens: float) -> float:
    """Seconds of the trainer for so many response tokens."""
    return tokens / (rates.train_tokens_per_s * together(setting.trainer_gpus))
