"""What a run may say whose rows bring their own responses: keys about sampled ones would do nothing."""

from collections.abc import Iterator
from typing import Final

from services.common.spec.algorithm import AlgorithmSpec
from services.common.spec.run import RunSpec

# Keys of ``algorithm`` that mean the same for both.
_COMMON: Final = frozenset(
    {"loss", "aggregation", "max_staleness", "stale_wait_timeout_s", "max_nonfinite_steps"}
)
# Those of losses of pairs, whose aggregation is the mean over these.
_OF_PAIRS: Final = _COMMON - {"aggregation"} | {"dpo_beta"}


def demonstrations(spec: RunSpec) -> Iterator[str]:
    """What is wrong with a run that learns demonstrations; nothing for others."""
    count, loss = spec.algorithm.num_demonstrations, spec.algorithm.loss
    if spec.rollout.engine == "none" and (not count or spec.data.heldout is not None):
        answers = "held-out answers are sampled or scored" if count else "responses are sampled"
        yield f"rollout.engine is 'none', but {answers}; name one that generates, such as 'torch'"
    if not count:
        return
    learns = f"algorithm.loss {loss!r} learns the answers of data.train"
    yield from _algorithm(spec.algorithm, learns)
    rollout, data = spec.rollout, spec.data
    if rollout.group_size != count:
        yield (
            f"rollout.group_size is {rollout.group_size}, but {learns}, of which each has {count}; leave it "
            "out"
        )
    if count > 1 and any(data.answer_column_of(part) is None for part in data.sets.values()):
        yield f"data.answer_column is null, but {learns}; name the column with the preferred ones"
    if rollout.sampling.temperature != 1:
        yield (
            f"rollout.sampling.temperature is {rollout.sampling.temperature:g}, but {learns} as they are, at "
            "1; leave it out, and set validation.temperature for held-out answers"
        )
    if rollout.routing_replay != "off":
        yield (
            f"rollout.routing_replay is {rollout.routing_replay!r}, but {learns}, for which no engine chose "
            "experts; leave it out"
        )
    if rollout.rewards and data.heldout is None:
        yield (
            f"rollout.rewards are given, but {learns} without any, and there are no held-out answers to "
            "score; name data.heldout, or remove rollout.rewards"
        )
    for name, part in data.train_sets.items():
        if part.source == "environment":
            yield (
                f"data.{name}.source is 'environment', which makes prompts without answers, but {learns}; "
                "name rows with answers"
            )


def _algorithm(algorithm: AlgorithmSpec, learns: str) -> Iterator[str]:
    plain = AlgorithmSpec(loss=algorithm.loss)
    common = _OF_PAIRS if algorithm.loss_kind.compares_members else _COMMON
    for name in AlgorithmSpec.model_fields:
        value, default = getattr(algorithm, name), getattr(plain, name)
        if name not in common and value != default:
            shown = value if isinstance(value, str | int | float) else "given"
            yield (
                f"algorithm.{name} is {shown!r}, but {learns}: nothing is sampled that it could be about; "
                "leave it out"
            )
