"""What a run may say of the models that it names: the policy's, and that of a teacher."""

from collections.abc import Iterator

from services.common.spec.model import TINY_PREFIX
from services.common.spec.run import RunSpec


def models(spec: RunSpec) -> Iterator[str]:
    """What is wrong with a model by itself."""
    for key, model in (("model", spec.model), ("teacher", spec.teacher)):
        if model is not None and model.warm_start is not None and not model.is_tiny:
            yield (
                f"{key}.warm_start is only for '{TINY_PREFIX}' presets, but {key}.path is {model.path!r}; "
                f"remove {key}.warm_start or name a preset"
            )


def teacher(spec: RunSpec) -> Iterator[str]:
    """What is wrong with a teacher, or with a run that trains by a penalty alone."""
    algorithm = spec.algorithm
    is_compared = algorithm.kl.coefficient > 0
    if spec.teacher is not None and algorithm.num_demonstrations:
        yield (
            f"teacher is given, but algorithm.loss {algorithm.loss!r} learns the answers of data.train, not "
            "the teacher's; remove teacher, or take another loss"
        )
    elif spec.teacher is not None and not is_compared:
        yield (
            "teacher is given, but algorithm.kl.coefficient is 0, so nothing is compared with it; leave the "
            "coefficient out, or remove teacher"
        )
    if algorithm.advantage == "none" and not is_compared:
        yield (
            "algorithm.advantage is 'none' and algorithm.kl.coefficient 0, so nothing would be trained; name "
            "a teacher, or another advantage"
        )
    if algorithm.advantage == "none" and algorithm.kl.placement == "reward" and is_compared:
        yield (
            "algorithm.kl.placement is 'reward', which algorithm.advantage 'none' does not look at; leave it "
            "out, or name another advantage"
        )
    sets = spec.data.heldout_sets.values()
    is_scored = spec.rollout.rewards or all(part.rewards for part in sets)
    if algorithm.advantage == "none" and not is_scored:
        yield (
            "data.heldout is given, but rollout.rewards are not, which would score its answers; name one (by "
            "algorithm.advantage 'none' it is only measured), or remove data.heldout"
        )
