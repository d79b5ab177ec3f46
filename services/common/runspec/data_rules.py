"""Rules on prompt sets, the length of a run, the curriculum, the best checkpoint and demonstrations."""

from collections.abc import Iterator
from itertools import chain
from typing import Final

from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.data import HeldoutSetSpec, set_name
from services.common.runspec.run import RunSpec
from services.common.runspec.suggestions import did_you_mean


def data(spec: RunSpec) -> Iterator[str]:
    """Yields problems of a run's prompts."""
    return chain.from_iterable(
        rule(spec) for rule in (_sets, _length, _weights, _curriculum, _best, _model_inputs)
    )


def _sets(spec: RunSpec) -> Iterator[str]:
    template = spec.data.prompt_template
    if "{prompt}" not in template:
        yield (
            f"data.prompt_template must contain '{{prompt}}', but is {template!r}; add '{{prompt}}' at the "
            "place of the prompt"
        )
    for split, source in spec.data.sets.items():
        if source.source == "environment" and source.limit is None:
            yield (
                f"data.{split}.limit is required for an environment: the number of its tasks in an epoch; "
                "set it, for example to 1000"
            )
        if source.source == "environment" and spec.rollout.workflow in (
            "single_turn",
            "multi_turn",
        ):
            yield (
                f"data.{split}.source is 'environment', whose rows have no prompt, but rollout.workflow is "
                f"{spec.rollout.workflow!r}; set it to 'environment', or use another source"
            )
        if source.prompt_template is not None and "{prompt}" not in source.prompt_template:
            yield (
                f"data.{split}.prompt_template must contain '{{prompt}}', but is "
                f"{source.prompt_template!r}; add '{{prompt}}' at the place of the prompt"
            )
    if spec.validation.only and spec.data.heldout is None:
        yield "validation.only needs data.heldout; set it to the held-out prompts"


def _length(spec: RunSpec) -> Iterator[str]:
    if spec.trainer.steps is None and spec.data.epochs is None:
        yield (
            "trainer.steps: is required, or data.epochs instead, for the length of the run; "
            "see docs/runspec.md for their meaning"
        )
    if spec.trainer.steps is not None and spec.data.epochs is not None:
        yield (
            f"data.epochs is {spec.data.epochs:g} and trainer.steps is {spec.trainer.steps}, but only one of "
            "them can set the length of the run; remove one"
        )


def _curriculum(spec: RunSpec) -> Iterator[str]:
    curriculum = spec.data.curriculum
    if curriculum is None:
        return
    if curriculum.arguments and curriculum.function is None:
        yield (
            "data.curriculum.arguments is set without data.curriculum.function, which receives them; set "
            "the function, or remove the arguments"
        )
    hopeless, solved = curriculum.hopeless_to, curriculum.solved_from
    if hopeless is None and solved is None and curriculum.function is None:
        yield (
            "data.curriculum skips no prompts: solved_from and hopeless_to are both null; set one of them or "
            "data.curriculum.function, or remove data.curriculum"
        )
    elif hopeless is not None and solved is not None and hopeless >= solved:
        yield (
            f"data.curriculum.hopeless_to ({hopeless:g}) must be below data.curriculum.solved_from "
            f"({solved:g})"
        )


def _weights(spec: RunSpec) -> Iterator[str]:
    sets = spec.data.train_sets.items()
    weights = {f"data.{name}.weight": getattr(part, "weight", None) for name, part in sets}
    lacking = [key for key, weight in weights.items() if weight is None]
    if 0 < len(lacking) < len(weights):
        yield (
            f"{', '.join(lacking)} must be set, because other sets of data.train have a weight; set weights "
            "for all sets, or for none to mix by the number of rows"
        )


def _model_inputs(spec: RunSpec) -> Iterator[str]:
    column = spec.data.model_inputs_column
    if column is None:
        return
    if spec.rollout.workflow in ("agent", "environment"):
        yield (
            f"data.model_inputs_column is {column!r}, but with rollout.workflow {spec.rollout.workflow!r} "
            "rows have no prompt to which the inputs could belong; leave it out, or use 'single_turn' or "
            "'multi_turn'"
        )
    if spec.trainer.context_parallel > 1:
        yield (
            f"data.model_inputs_column is {column!r}, but with trainer.context_parallel "
            f"({spec.trainer.context_parallel}) a rank has only a part of each prompt; set it to 1"
        )


def _best(spec: RunSpec) -> Iterator[str]:
    best, key = spec.trainer.checkpoint.best, "trainer.checkpoint.best"
    if best is None:
        return
    sets = {set_name(split): part for split, part in spec.data.heldout_sets.items()}
    if not sets:
        yield f"{key} compares held-out scores, but data.heldout is not set; set it, or remove {key}"
        return
    every, saved = spec.validation.every, spec.trainer.checkpoint.every
    if not every or not saved or every % saved:
        yield (
            f"{key} needs a checkpoint of each version that is evaluated, but trainer.checkpoint.every is "
            f"{saved} and validation.every is {every}; set validation.every to a multiple of "
            "trainer.checkpoint.every"
        )
    if best.set is not None and best.set not in sets:
        yield (
            f"{key}.set is {best.set!r}, but data.heldout has the sets {', '.join(sets)}; use one of them."
            f"{did_you_mean(best.set, tuple(sets))}"
        )
        return
    if best.set is None and len(sets) > 1:
        if best.metric not in ("greedy", "sampled"):
            yield (
                f"{key}.metric {best.metric!r} is a score of one set, but data.heldout has {len(sets)} sets; "
                f"set {key}.set to one of {', '.join(sets)}"
            )
        return
    part = sets[best.set or next(iter(sets))]
    own = part.samples_per_prompt if isinstance(part, HeldoutSetSpec) else None
    count = spec.validation.samples_per_prompt if own is None else own
    if best.metric not in (known := _scores(count)) and not best.metric.startswith("reward/"):
        yield (
            f"{key}.metric is {best.metric!r}, but with {count} sampled responses per prompt the metrics are "
            f"{', '.join(known)} and reward/TERM; use one of them, or change validation.samples_per_prompt"
        )


def _scores(count: int) -> list[str]:
    """Returns the scores of a set by the number of sampled responses per prompt."""
    if not count:
        return ["greedy"]
    powers = [1 << power for power in range(count.bit_length())]
    return ["greedy", "sampled", "best", "maj", *(f"pass@{k}" for k in sorted({*powers, count}))]


# Keys of ``algorithm`` that also apply to demonstrations.
_COMMON: Final = frozenset(
    {"loss", "aggregation", "max_staleness", "stale_wait_timeout_s", "max_nonfinite_steps"}
)
# Keys that apply to losses of pairs, whose aggregation is always the mean over pairs.
_OF_PAIRS: Final = _COMMON - {"aggregation"} | {"dpo_beta"}


def demonstrations(spec: RunSpec) -> Iterator[str]:
    """Yields problems of a run that trains on demonstrations; none for other runs."""
    count, loss = spec.algorithm.num_demonstrations, spec.algorithm.loss
    if spec.rollout.engine == "none" and (not count or spec.data.heldout is not None):
        answers = "held-out answers are sampled or scored" if count else "responses are sampled"
        yield f"rollout.engine is 'none', but {answers}; use an engine that generates, such as 'torch'"
    if not count:
        return
    learns = f"algorithm.loss {loss!r} learns the answers of data.train"
    yield from _algorithm(spec.algorithm, learns)
    rollout, data = spec.rollout, spec.data
    if rollout.group_size != count:
        yield (
            f"rollout.group_size is {rollout.group_size}, but {learns}, and each prompt has {count}; remove "
            "the key"
        )
    if count > 1 and any(data.answer_column_of(part) is None for part in data.sets.values()):
        yield f"data.answer_column is null, but {learns}; set it to the column with the preferred answers"
    if rollout.sampling.temperature != 1:
        yield (
            f"rollout.sampling.temperature is {rollout.sampling.temperature:g}, but {learns}, at temperature "
            "1; remove the key, and set validation.temperature for held-out answers"
        )
    if rollout.routing_replay != "off":
        yield (
            f"rollout.routing_replay is {rollout.routing_replay!r}, but {learns}, and no engine chose "
            "experts for them; remove the key"
        )
    if rollout.rewards and data.heldout is None:
        yield (
            f"rollout.rewards is set, but {learns} without rewards, and there are no held-out prompts; "
            "set data.heldout, or remove rollout.rewards"
        )
    for name, part in data.train_sets.items():
        if part.source == "environment":
            yield (
                f"data.{name}.source is 'environment', which provides prompts without answers, but {learns}; "
                "use a source with answers"
            )


def _algorithm(algorithm: AlgorithmSpec, learns: str) -> Iterator[str]:
    plain = AlgorithmSpec(loss=algorithm.loss)
    common = _OF_PAIRS if algorithm.loss_kind.compares_members else _COMMON
    for name in AlgorithmSpec.model_fields:
        value, default = getattr(algorithm, name), getattr(plain, name)
        if name not in common and value != default:
            shown = repr(value) if isinstance(value, str | int | float) else "set"
            yield (
                f"algorithm.{name} is {shown}, but {learns} and samples no responses, so it would have no "
                "effect; remove the key"
            )
