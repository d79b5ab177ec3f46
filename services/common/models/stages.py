"""Division of a model's weights among pipeline stages. Imports no torch."""

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any

from services.common.models.families import num_experts
from services.common.runspec.run import RunSpec


def stage_layers(num_layers: int, num_stages: int, *, head: float = 0.0) -> list[range]:
    """Returns the layers of each stage: consecutive, and such that the slowest stage has the least work.

    The last stage also computes the output head, so it has fewer layers where the head is large. Layers that
    are left over go to the middle first, because the first stage also has the embedding.

    Args:
        head: Work of the output head in layers; see :func:`head_in_layers`.

    Raises:
        ValueError: If a stage would have no layer.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"trainer.pipeline_parallel is {num_stages}, but model.path has {num_layers} layers, and every "
            f"stage needs one; set it to at most {num_layers}"
        )
    if num_stages == 1:
        return [range(num_layers)]

    def work(counts: Sequence[int]) -> tuple[float, float]:
        loads = [*counts[:-1], counts[-1] + head]
        return max(loads), sum(load**2 for load in loads)

    divisions = (
        [*_even(num_layers - last, num_stages), last]
        for last in range(1, num_layers - num_stages + 2)
    )
    counts = min(divisions, key=work)
    starts = [sum(counts[:stage]) for stage in range(num_stages + 1)]
    return [range(starts[stage], starts[stage + 1]) for stage in range(num_stages)]


def _even(num_layers: int, num_stages: int) -> list[int]:
    """Returns the number of layers of each stage but the last."""
    decoder_stages = range(num_stages - 1)
    counts = [num_layers // len(decoder_stages)] * len(decoder_stages)
    by_distance = sorted(decoder_stages, key=lambda stage: abs(2 * stage + 1 - num_stages))
    for stage in by_distance[: num_layers % len(decoder_stages)]:
        counts[stage] += 1
    return counts


def head_in_layers(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> float:
    """Returns the work of the output head of a model as a number of its average layers.

    Args:
        config: The language model's configuration.
        shapes: Shape of each weight of the model by name.
    """
    experts = num_experts(config)
    share = (config.get("num_experts_per_tok") or 1) / experts if experts else 1.0
    active = sum(
        prod(shape) * (share if ".experts." in name else 1.0)
        for name, shape in shapes.items()
        if ".layers." in name
    )
    head = int(config["vocab_size"]) * int(config["hidden_size"])
    return int(config["num_hidden_layers"]) * head / active


def stages_of(name: str, division: Sequence[range], *, is_tied: bool) -> tuple[int, ...]:
    """Returns the stages that hold a weight: the first one has the embedding, the last one norm and head.

    Args:
        name: Name of the weight in the model.
        division: Result of :func:`stage_layers`.
        is_tied: True if the output head is the embedding, which both the first and the last stage then hold.
    """
    last = len(division) - 1
    _, separator, after = name.partition("layers.")
    if separator:
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
