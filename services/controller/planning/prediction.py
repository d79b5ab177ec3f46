"""What a run would be like: enough simulated steps for means that hold, and no more work than a second's."""

import math
from dataclasses import replace

from services.controller.planning.outcome import Prediction
from services.controller.planning.rates import DecodeTime, Rates, Setting
from services.controller.planning.simulation import Simulation

_LEAST_STEPS, _MOST_STEPS = 8, 40
_SAMPLES = 10_000
"""That are simulated at least, if that takes no more steps than allowed."""
_MOST_GROUPS = 64


def predict(rates: Rates, setting: Setting, *, num_steps: int | None = None) -> Prediction:
    """What a run's steps are like once it has filled up; the same for the same arguments.

    Args:
        rates: Of its parts.
        setting: How it is set up.
        num_steps: Steps that are reckoned, behind those in which it fills up; None takes as many as are
            needed for means that hold.
    """
    few = math.ceil(_SAMPLES / setting.samples_per_step)
    found = Simulation(*_smaller(rates, setting)).run(
        num_steps or max(_LEAST_STEPS, min(few, _MOST_STEPS))
    )
    return replace(found, samples_per_s=setting.samples_per_step / found.step_s)


def _smaller(rates: Rates, setting: Setting) -> tuple[Rates, Setting]:
    """The same with fewer and slower parts, where single groups of a step do not matter any more."""
    parts = min(setting.groups_per_step // _MOST_GROUPS, setting.places)
    if parts < 2:
        return rates, setting
    decode = rates.decode
    slower = replace(
        rates,
        train_tokens_per_s=rates.train_tokens_per_s / parts,
        prompt_s=rates.prompt_s * parts,
        decode=DecodeTime(
            fixed_s=decode.fixed_s,
            sample_s=decode.sample_s * parts,
            most_samples=decode.most_samples / parts,
        ),
    )
    smaller = replace(
        setting,
        groups_per_step=setting.groups_per_step // parts,
        places=setting.places // parts,
    )
    return slower, smaller
