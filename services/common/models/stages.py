"""Division of a model's weights among pipeline stages. Imports no torch."""

from collections.abc import Sequence
from math import ceil

from services.common.runspec.run import RunSpec


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Returns the layers of each stage: consecutive, and at most one more on one stage than on another.

    Layers that are left over go to the middle first, because the first stage also has the embedding and the
    last one the head.

    Raises:
        ValueError: If a stage would have no layer.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"trainer.pipeline_parallel is {num_stages}, but model.path has {num_layers} layers, and every "
            f"stage needs one; set it to at most {num_layers}"
        )
    counts = [num_layers // num_stages] * num_stages
    by_distance = sorted(range(num_stages), key=lambda stage: abs(2 * stage + 1 - num_stages))
    for stage in by_distance[: num_layers % num_stages]:
        counts[stage] += 1
    starts = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return [range(starts[stage], starts[stage + 1]) for stage in range(num_stages)]


def stages_of(name: str, division: Sequence[range], *, is_tied: bool) -> tuple[int, ...]:
    """Returns the stages that hold a weight: the first one has the embedding, the last one norm and head.

    Args:
        name: Name of the weight in the model.
        division: Result of :func:`stage_layers`.
        is_tied: True if the output head is the embedding, which both the first and the last stage then hold.
    """
    last = len(division) - 1
    _, found, after = name.partition("layers.")
    if found:
        number = int(after.partition(".")[0])
        return tuple(stage for stage, layers in enumerate(division) if number in layers)
    if "embed_tokens." in name:
        return (0, last) if is_tied and last > 0 else (0,)
    return (last,)


def bubble(num_stages: int, num_packs: int) -> float:
    """Returns the share of an update's passes in which a stage is idle, if all micro-batches are equal.

    Under 1F1B and GPipe, a stage waits for as many micro-batches as there are other stages.
    """
    return (num_stages - 1) / (num_packs + num_stages - 1)


def most_packs(spec: RunSpec) -> int:
    """Returns the largest number of micro-batches of an update that a run can have on one pipeline.

    That is with the longest samples, and without shared prefixes.
    """
    trainer = spec.trainer
    longest = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    pipelines = trainer.stage_ranks // trainer.tensor_parallel
    samples = ceil(
        trainer.prompts_per_step * spec.samples_per_group / trainer.updates_per_step / pipelines
    )
    budget = trainer.tokens_per_micro_batch * trainer.context_parallel
    return max(1, min(samples, ceil(samples * longest / budget)))
