"""Rules across the keys of a RunSpec. Each rule yields its problems; all are reported at once.

A message begins with a key and names all keys involved, their values, and a fix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import chain
from operator import attrgetter
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from services.common.callables import is_reference
from services.common.doors import DoorError
from services.common.fields import FIELDS, TOKEN_REWARDS
from services.common.runspec.algorithm import AlgorithmSpec
from services.common.runspec.base import did_you_mean, in_yaml
from services.common.runspec.data import HeldoutSetSpec, set_name
from services.common.runspec.engines import ENGINES, engine_kind, train_engine_kind
from services.common.runspec.formulas import ADVANTAGES, LOSSES, Formula
from services.common.runspec.rollout import (
    EARNED,
    IMAGE,
    NEED_ANSWERS,
    REWARD_SERVICES,
    REWARDS,
    WORKFLOWS,
    RewardSpec,
    SpeculationSpec,
    environment_kind,
    is_service,
    plain_url,
)
from services.common.runspec.run import TINY_PREFIX, RunSpec, TeacherSpec
from services.common.runspec.topology import ScoringSpec, TaskGroupError
from services.common.runspec.trainer import HOST_OPTIMIZERS, OPTIMIZERS, CriticSpec, LoraSpec
from services.common.runspec.urls import url_keys
from services.common.runspec.weight_modes import (
    HANDLE,
    HOST_MODE,
    MIN_BUCKET_BYTES,
    MODES,
    STAGING_SLOTS,
    transport_of,
)
from services.common.runspec.workers import WORKERS, kinds_with_own_gpus, scoring_ranks
from services.common.stores import url_problem, without_secrets


def data(spec: RunSpec) -> Iterator[str]:
    """Yields problems of a run's prompts."""
    return chain.from_iterable(
        rule(spec)
        for rule in (_sets, _length, _weights, _curriculum, _best, _model_inputs, _images)
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
    elif not spec.is_rewarded and (hopeless is not None or solved is not None):
        yield (
            "data.curriculum.solved_from and hopeless_to skip prompts by their rewards, but no sample that "
            "trains has one; set data.curriculum.function in their place, or remove data.curriculum"
        )


def _weights(spec: RunSpec) -> Iterator[str]:
    sets = spec.data.train_sets.items()
    weights = {f"data.{name}.weight": getattr(dataset, "weight", None) for name, dataset in sets}
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


def _images(spec: RunSpec) -> Iterator[str]:
    if spec.model.images:
        refused = {
            "rollout.quantization": (
                spec.rollout.quantization is not None,
                "but quantized vision towers are not compared",
            ),
            "rollout.speculation": (
                spec.rollout.speculation is not None,
                "but drafts after images are not compared",
            ),
            "trainer.context_parallel": (
                spec.trainer.context_parallel > 1,
                "but a rank must have whole prompts",
            ),
            "data.model_inputs_column": (
                spec.data.model_inputs_column is not None,
                "but the inputs of a prompt are its images",
            ),
            "algorithm.loss": (
                spec.algorithm.num_demonstrations > 0,
                "but demonstrations are text only",
            ),
            "trainer.tensor_parallel": (
                spec.trainer.tensor_parallel > 1,
                "but a vision tower is not divided",
            ),
        }
        for key, (is_set, why) in refused.items():
            if is_set:
                yield f"model.images is true and {key} is set, {why}; change one of them"
        if spec.trainer.lora is not None and not spec.trainer.freeze_vision_tower:
            yield (
                "trainer.lora trains adapters of the language model only, but trainer.freeze_vision_tower is "
                "false; set it to true"
            )
    elif not spec.trainer.freeze_vision_tower:
        yield (
            "trainer.freeze_vision_tower is false, but no vision tower is loaded; set model.images to true"
        )


def _best(spec: RunSpec) -> Iterator[str]:
    best, key = spec.trainer.checkpoint.best, "trainer.checkpoint.best"
    if best is None:
        return
    sets = {set_name(split): dataset for split, dataset in spec.data.heldout_sets.items()}
    if not sets:
        yield f"{key} compares held-out scores, but data.heldout is not set; set it, or remove {key}"
        return
    every, checkpoint_every = spec.validation.every, spec.trainer.checkpoint.every
    if not every or not checkpoint_every or every % checkpoint_every:
        fixed = (
            "validation.every to a multiple of trainer.checkpoint.every"
            if checkpoint_every
            else f"trainer.checkpoint.every to a divisor of validation.every, for example {every}"
            if every
            else "both to the same number of steps"
        )
        yield (
            f"{key} needs a checkpoint of each version that is evaluated, but trainer.checkpoint.every is "
            f"{checkpoint_every} and validation.every is {every}; set {fixed}"
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
    dataset = sets[best.set or next(iter(sets))]
    set_count = dataset.samples_per_prompt if isinstance(dataset, HeldoutSetSpec) else None
    count = spec.validation.samples_per_prompt if set_count is None else set_count
    if best.metric not in (metrics := _scores(count)) and not best.metric.startswith("reward/"):
        yield (
            f"{key}.metric is {best.metric!r}, but with {count} sampled responses per prompt the metrics are "
            f"{', '.join(metrics)} and reward/TERM; use one of them, or change validation.samples_per_prompt"
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
            f"the key, or set it to {count}"
        )
    if count > 1 and any(data.answer_column_of(dataset) is None for dataset in data.sets.values()):
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
            "set data.heldout, or remove rollout.rewards or set it to []"
        )
    for name, dataset in data.train_sets.items():
        if dataset.source == "environment":
            yield (
                f"data.{name}.source is 'environment', which provides prompts without answers, but {learns}; "
                "use a source with answers"
            )


def reward_model(spec: RunSpec) -> Iterator[str]:
    """Yields problems of a run that trains a reward model; none for other runs."""
    if not spec.algorithm.loss_kind.trains_values:
        return
    trains = f"algorithm.loss {spec.algorithm.loss!r} trains a model that generates nothing"
    if spec.data.heldout is not None:
        yield (
            f"data.heldout is set, but {trains}, so rollouts cannot score held-out answers; remove it, and "
            "score them with the exported model"
        )
    if spec.trainer.lora is not None:
        yield f"trainer.lora is set, but {trains}, and its value head has no adapter; remove it"
    if spec.trainer.balancing.kind != "none":
        yield (
            f"trainer.balancing.kind is {spec.trainer.balancing.kind!r}, but {trains} and does not balance "
            "experts; remove it"
        )


def _algorithm(algorithm: AlgorithmSpec, learns: str) -> Iterator[str]:
    plain = AlgorithmSpec(loss=algorithm.loss)
    common = _COMMON
    if algorithm.loss_kind.compares_members:  # the aggregation is always the mean over pairs
        common = _COMMON - {"aggregation"} | {"loss_arguments", *algorithm.loss_kind.keys}
    for name in AlgorithmSpec.model_fields:
        value, default = getattr(algorithm, name), getattr(plain, name)
        if name not in common and value != default:
            text, fix = "set", "remove the key"
            if isinstance(value, str | int | float):
                # An override cannot remove a key.
                text, fix = in_yaml(value), f"remove the key, or set it to {in_yaml(default)}"
            yield (
                f"algorithm.{name} is {text}, but {learns} and samples no responses, so it would have no "
                f"effect; {fix}"
            )


def placement(spec: RunSpec) -> Iterator[str]:
    """Yields problems of the task groups, or of colocation."""
    topology = spec.topology
    if topology.is_colocated:
        yield from _turns(spec)
        return
    if not topology.task_groups:
        if topology.ratios or topology.gpus:
            yield (
                "topology.ratios and topology.gpus apply to task groups, but topology.task_groups is "
                "empty; set it, or use trainer.world_size and rollout.replicas instead"
            )
        if topology.scoring_ranks > 1:
            yield _NOBODY_SHARDED.format(topology.scoring_ranks)
        yield from _scoring(spec, has_scorers=False)
        return
    if topology.gpus == 0:
        yield "topology.task_groups needs topology.gpus, the number of GPUs to split"
        return
    try:
        topology.place()
        engine_gpus = spec.engine_gpus
    except ValueError as error:
        yield f"topology.task_groups: {error}"
        return
    kinds = kinds_with_own_gpus(topology).values()
    has_scorers = any(kind.ranks is scoring_ranks for kind in kinds)
    if topology.scoring_ranks > 1 and not has_scorers:
        yield _NOBODY_SHARDED.format(topology.scoring_ranks)
    yield from _scoring(spec, has_scorers=has_scorers)
    yield from _counts(spec, engine_gpus)
    for kind in kinds_with_own_gpus(topology).values():
        yield from kind.problems(spec)
    yield from _neighbours(spec)


def _scoring(spec: RunSpec, *, has_scorers: bool) -> Iterator[str]:
    """Yields problems of the parallelism of workers that only score."""
    scoring, ranks = spec.topology.scoring, spec.topology.scoring_ranks
    if scoring != ScoringSpec() and not has_scorers:
        yield (
            "topology.scoring is the parallelism of workers that only score, but no task that only scores "
            "(logp, ref_logp) has its own GPUs; add a group for one of them to topology.task_groups, or "
            "remove topology.scoring"
        )
        return
    if ranks % (scoring.tensor_parallel * scoring.expert_parallel):
        yield (
            f"topology.scoring_ranks is {ranks}, which is no multiple of topology.scoring.tensor_parallel "
            f"({scoring.tensor_parallel}) times topology.scoring.expert_parallel "
            f"({scoring.expert_parallel}); set it to {scoring.tensor_parallel * scoring.expert_parallel}"
        )


_NOBODY_SHARDED = (
    "topology.scoring_ranks is {}, but no task that only scores (logp, ref_logp) has its own GPUs; add "
    "a group for one of them to topology.task_groups, or remove topology.scoring_ranks"
)


def _counts(spec: RunSpec, engine_gpus: int) -> Iterator[str]:
    """Yields problems of process counts that differ from those of the task groups."""
    kinds = [kind for kind in WORKERS.values() if kind.is_required]
    kinds += kinds_with_own_gpus(spec.topology).values()
    try:
        spec.topology.place({kind.task: kind.unit(spec) for kind in kinds})
    except ValueError as error:
        yield f"topology.ratios: {error}"
        return
    counts = {
        "trainer.world_size": (spec.trainer.world_size, spec.topology.gpus_of("train")),
        "rollout.replicas": (
            spec.rollout.replicas,
            spec.topology.gpus_of("generate") // engine_gpus,
        ),
    }
    for key, (stated, follows) in counts.items():
        if stated != follows:
            yield (
                f"{key} is {stated}, but topology implies {follows}; remove the key, or change "
                "topology.ratios"
            )


def _neighbours(spec: RunSpec) -> Iterator[str]:
    """Yields problems of tasks that share GPUs with other tasks, or have a group without their workers."""
    for group in spec.topology.place().groups:
        for kind in WORKERS.values():
            other_tasks = [task for task in group.tasks if task not in kind.tasks]
            is_inside = "train" in group.tasks and not kind.is_required
            if kind.is_alone and kind.task in group.tasks and other_tasks and not is_inside:
                yield (
                    f"topology.task_groups puts {', '.join(group.tasks)} on the same GPUs, but "
                    f"{kind.task} does not share its GPUs; put {kind.task} into its own group"
                )
            for task in kind.tasks[1:]:
                if task in group.tasks and kind.task not in group.tasks:
                    yield (
                        f"topology.task_groups gives {task} its own GPUs, but {task} runs in the "
                        f"processes of {kind.task}; put it into the group of {kind.task}, or remove it"
                    )


def _turns(spec: RunSpec) -> Iterator[str]:
    """Yields problems of colocation: trainer and rollouts take turns, and only rollouts have other GPUs."""
    apart = "or set topology.placement to 'disaggregated'"
    for problem in (*_unequal(spec), *_concurrent_use(spec)):
        yield f"topology.placement is {spec.topology.placement!r}, but {problem}, {apart}"


def _unequal(spec: RunSpec) -> Iterator[str]:
    """Yields problems of rollouts that do not fill the trainer's GPUs equally.

    No other rollouts exist, except in a mixed placement, which needs at least one.
    """
    topology, ranks, replicas = spec.topology, spec.trainer.world_size, spec.rollout.replicas
    if topology.task_groups or topology.ratios or topology.gpus or topology.scoring_ranks > 1:
        yield (
            "all tasks share the GPUs, which topology.task_groups, ratios, gpus and scoring_ranks would "
            "split; remove these keys"
        )
    engine_gpus = spec.engine_gpus
    if topology.placement == "mixed":
        least = ranks // engine_gpus + 1
        if ranks % engine_gpus:
            yield (
                f"engines with {engine_gpus} GPUs do not cover trainer.world_size ({ranks}) evenly; set it "
                f"to a multiple of {engine_gpus}"
            )
        elif replicas < least:
            yield (
                f"rollout.replicas ({replicas}) leaves no rollout with its own GPUs: {least - 1} with "
                f"{engine_gpus} GPU(s) each share the trainer's GPUs, trainer.world_size ({ranks}); set "
                f"rollout.replicas to {least} or more, set topology.placement to 'colocated'"
            )
    elif ranks % engine_gpus or replicas * engine_gpus % ranks:
        yield (
            f"rollout.replicas ({replicas}) with {engine_gpus} GPU(s) each do not cover the trainer's GPUs, "
            f"trainer.world_size ({ranks}), evenly; set rollout.replicas to {max(1, ranks // engine_gpus)}, "
            f"and trainer.world_size to a multiple of {engine_gpus}"
        )


def _concurrent_use(spec: RunSpec) -> Iterator[str]:
    """Yields problems of settings that need GPUs while the other side has them."""
    able = ", ".join(name for name, kind in ENGINES.items() if kind.sleeps)
    if not ENGINES[spec.rollout.engine].sleeps:
        yield (
            f"engine {spec.rollout.engine!r} cannot release its GPU memory while the trainer works; use "
            f"one of {able}"
        )
    num_others = max(0, spec.rollout.replicas - spec.colocated_rollouts)
    if spec.algorithm.max_staleness > 1 and not num_others:
        yield (
            "rollouts cannot run ahead of training by algorithm.max_staleness "
            f"{spec.algorithm.max_staleness} versions; set it to 0 or 1"
        )
    if spec.algorithm.num_demonstrations:
        loss = spec.algorithm.loss
        yield f"algorithm.loss {loss!r} samples no responses for training; use another loss"
    if spec.validation.replicas > num_others:
        yield (
            f"validation.replicas is {spec.validation.replicas}, but only {num_others} rollout(s) generate "
            f"while the trainer works; set it to {max(0, num_others)}"
        )
    if MODES[spec.weight_sync.mode].is_in_place:
        yield (
            f"weight_sync.mode {spec.weight_sync.mode!r} writes into live weights, which a sleeping engine "
            "does not have; remove it"
        )
    for key, (value, fitting, why) in {
        "rollout.kv_policy": (
            spec.rollout.kv_policy, "recompute", "a sleeping engine drops its KV cache",
        ),
        "weight_sync.publish_every": (
            spec.weight_sync.publish_every, 1, "an engine needs weights after it wakes",
        ),
        "trainer.accumulate_early": (
            spec.trainer.accumulate_early, False, "no training is possible while rollouts have the GPUs",
        ),
    }.items():  # fmt: skip
        if value != fitting:
            yield f"{key} is {value!r}, and {why}; set it to {fitting!r}"


def models(spec: RunSpec) -> Iterator[str]:
    """Yields problems of each model by itself."""
    for key, model in (("model", spec.model), ("teacher", spec.teacher)):
        if model is not None and model.warm_start is not None and not model.is_tiny:
            yield (
                f"{key}.warm_start is only for '{TINY_PREFIX}' presets, but {key}.path is {model.path!r}; "
                f"remove {key}.warm_start or use a preset"
            )


def teacher(spec: RunSpec) -> Iterator[str]:
    """Yields problems of a teacher, or of a run that trains with a penalty only."""
    algorithm, kind = spec.algorithm, spec.algorithm.loss_kind
    is_compared = algorithm.kl.coefficient > 0 or kind.distills
    if spec.teacher is not None and algorithm.num_demonstrations:
        yield (
            f"teacher is set, but algorithm.loss {algorithm.loss!r} learns the answers of data.train, not "
            "the teacher's; remove teacher, or use another loss"
        )
    elif spec.teacher is not None and not is_compared:
        yield (
            "teacher is set, but algorithm.kl.coefficient is 0, so the teacher is not used; remove "
            "algorithm.kl.coefficient or teacher"
        )
    if spec.teacher is None and kind.distills:
        yield "algorithm.loss is 'distill', but teacher, whose distributions it learns, is null; set it"
    if spec.teacher is not None:
        yield from _taught(spec, spec.teacher)
    if algorithm.advantage == "none" and not is_compared:
        yield (
            "algorithm.advantage is 'none' and algorithm.kl.coefficient 0, so nothing would be trained; set "
            "teacher, or use another advantage"
        )
    if algorithm.advantage != "none" and kind.distills:
        yield (
            f"algorithm.advantage is {algorithm.advantage!r}, but algorithm.loss 'distill' uses none; "
            "remove it, or use another loss with algorithm.kl"
        )
    if algorithm.advantage == "none" and algorithm.kl.placement == "reward" and is_compared:
        yield (
            "algorithm.kl.placement is 'reward', but algorithm.advantage 'none' ignores rewards; remove "
            "algorithm.kl.placement, or use another advantage"
        )
    sets = spec.data.heldout_sets.values()
    is_scored = spec.rollout.rewards or all(dataset.rewards for dataset in sets)
    if algorithm.advantage == "none" and not is_scored:
        yield (
            "data.heldout is set, but rollout.rewards, which score its answers, is not; set it (with "
            "algorithm.advantage 'none' it is only measured), or remove data.heldout"
        )


def _taught(spec: RunSpec, teacher: TeacherSpec) -> Iterator[str]:
    """Yields problems of the way in which a teacher's distributions reach the trainer."""
    distill, urls, sampling = spec.distillation, spec.teacher_urls, spec.rollout.sampling
    if urls:
        yield from _served(spec, urls)
    if spec.model.images and (urls or teacher.has_own_prompt):
        yield (
            "model.images is set, but a served teacher, or one with its own prompt, sees no images; remove "
            "teacher.url, teacher.prompt_column and teacher.demonstration"
        )
    if distill is not None and sampling.is_truncated:
        yield (
            "algorithm.loss 'distill' compares distributions over all tokens, but rollout.sampling.top_k or "
            "top_p excludes some; set top_p to 1 and top_k to 0"
        )
    if teacher.prompt_column is not None and teacher.demonstration is not None:
        yield "teacher.prompt_column and teacher.demonstration are both set; remove one of them"
    if teacher.is_policy and not (distill and teacher.has_own_prompt and not urls):
        yield (
            "teacher.path is 'policy', so the policy teaches itself, which needs algorithm.loss 'distill', "
            "teacher.prompt_column or teacher.demonstration, and no server; set them, or set teacher.path"
        )
    if teacher.is_policy and spec.algorithm.kl.coefficient > 0:
        yield (
            "teacher.path is 'policy', so algorithm.kl has no reference; set algorithm.kl.coefficient to 0"
        )
    is_moving = teacher.is_policy and spec.trainer.updates_per_step > 1
    if distill is not None and distill.top_k is None and is_moving:
        yield (
            "algorithm.loss_arguments.top_k is null, and the output head of the policy, its own teacher, "
            "changes between the updates of a step; set top_k, or trainer.updates_per_step to 1"
        )


def _served(spec: RunSpec, urls: Mapping[str, str]) -> Iterator[str]:
    """Yields problems of served teachers, by their addresses."""
    distill, temperature = spec.distillation, spec.rollout.sampling.temperature
    without = [split for split in spec.data.train_sets if split not in urls]
    if without:
        yield (
            f"data.{without[0]}.teacher_url and teacher.url are not set, but other sets have a "
            "served teacher; set one of them"
        )
    if temperature != 1:
        yield (
            f"rollout.sampling.temperature is {temperature:g}, but servers return a teacher's "
            "logprobs at 1; set it to 1, or remove the teacher's url"
        )
    if distill is not None and distill.top_k is None:
        yield (
            "algorithm.loss_arguments.top_k is null, but a server returns the most likely tokens only; set "
            "it, for example to 64, or remove the teacher's url"
        )


_ITEM_BYTES = {"bool": 1, "int32": 4, "float32": 4}


def quota(spec: RunSpec, *, expert_bytes: int = 0) -> Iterator[str]:
    """Yields a problem if the quota is smaller than a batch of maximum length.

    A batch of any length is trained only after all its samples are stored.

    Args:
        expert_bytes: Bytes per token of the chosen experts, if they are stored.
    """
    limit, size = spec.transferqueue.quota_bytes, batch_bytes(spec, expert_bytes=expert_bytes)
    prompts, group_size = spec.trainer.prompts_per_step, spec.samples_per_group
    longest, token_bytes = spec.rollout.max_response_tokens, _token_bytes(spec) + expert_bytes
    if size > limit:
        yield (
            f"transferqueue.quota_bytes is {limit:,}, but a batch may take {size:,}: "
            f"trainer.prompts_per_step ({prompts}) groups of {group_size} responses of up to "
            f"rollout.max_response_tokens ({longest}), {token_bytes} bytes a token, and training starts "
            f"after all are stored; raise it, to {2 * size} to leave room for the next batch"
        )


def batch_bytes(spec: RunSpec, *, expert_bytes: int = 0) -> int:
    """Returns the max bytes of a batch in the transferqueue, if all responses have the maximum length.

    Args:
        expert_bytes: Bytes per token of the chosen experts, if they are stored.
    """
    group_size = spec.samples_per_group
    response_bytes = spec.rollout.max_response_tokens * (_token_bytes(spec) + expert_bytes)
    prompt_bytes = spec.data.max_prompt_tokens * (4 + group_size * expert_bytes)
    return spec.trainer.prompts_per_step * (group_size * response_bytes + prompt_bytes)


def _token_bytes(spec: RunSpec) -> int:
    """Returns the bytes that a rollout stores per response token."""
    mask_bytes = 4 * spec.rollout.sampling.top_k
    column_bytes = 4 * len(spec.reward_columns)
    num_reported = spec.algorithm.score_centering
    column_bytes += 0 if num_reported is None else 8 * (num_reported + 1)
    are_placed = spec.has_token_rewards
    return (
        mask_bytes
        + column_bytes
        + sum(
            _ITEM_BYTES[field.dtype]
            for field in FIELDS
            if (field.shape, field.producer) == ("[R]", "rollout")
            and (are_placed or field.name != TOKEN_REWARDS)
        )
    )


def weight_sync(spec: RunSpec) -> Iterator[str]:
    """Yields problems of the weight transfer."""
    sync, lora = spec.weight_sync, spec.trainer.lora
    mode = MODES[sync.mode]
    fitting = ("auto", HANDLE, transport_of("cpu"))
    if mode.through_host and sync.backend not in fitting and not sync.is_stored:
        yield (
            f"weight_sync.mode {sync.mode} transfers weights through host memory, which {sync.backend} does "
            "not support; set weight_sync.backend to auto"
        )
    yield from _stored(spec)
    num_senders = 1 if sync.senders == "leader" else spec.trainer.world_size
    least_staging = STAGING_SLOTS * MIN_BUCKET_BYTES * num_senders
    if sync.staging_bytes is not None and sync.staging_bytes < least_staging:
        yield (
            f"weight_sync.staging_bytes is {sync.staging_bytes}, but a receiver stages {STAGING_SLOTS} "
            f"buckets of at least {MIN_BUCKET_BYTES} bytes for each of {num_senders} senders "
            f"(trainer.world_size); set it to {least_staging} or more, or weight_sync.senders to 'leader'"
        )
    if lora is not None and lora.sync == "adapter":
        yield from _alone(spec, lora)
    if lora is not None and lora.base_dtype is not None and spec.adds_adapters:
        yield (
            f"trainer.lora.base_dtype {lora.base_dtype} rounds the base of the run, but the servers of "
            f"rollout.engine {spec.rollout.engine} add adapters to the weights of model.path; remove the "
            "key, or set trainer.lora.sync to merged"
        )
    ahead = spec.algorithm.max_staleness + 1
    if sync.publish_every > ahead and not spec.algorithm.num_demonstrations:
        yield (
            f"weight_sync.publish_every is {sync.publish_every}, but with algorithm.max_staleness "
            f"{ahead - 1} rollouts generate for {ahead} steps under the same weights, then wait for new "
            "ones; lower the first or raise the second"
        )


def _stored(spec: RunSpec) -> Iterator[str]:
    """Yields problems of weights that rollouts load from a store."""
    sync = spec.weight_sync
    if not sync.is_stored:
        if sync.storage is not None:
            yield (
                f"weight_sync.storage is set, but weight_sync.backend is {sync.backend!r}, which uses no "
                "store; set the backend to 'storage', or remove the key"
            )
        return
    name = f"weight_sync.backend {sync.backend!r}"
    if sync.storage is None:
        yield (
            f"{name} needs weight_sync.storage.directory: a folder that trainer and rollouts share, or a "
            "URL such as s3://bucket/folder"
        )
    if spec.topology.is_colocated:
        yield (
            f"{name} lets each rollout load weights when it can, but with topology.placement "
            f"{spec.topology.placement!r} trainer and rollouts take turns on their GPUs; set the backend to "
            "'auto'"
        )
    if MODES[sync.mode].is_in_place:
        yield (
            f"{name} with weight_sync.mode {sync.mode!r} would pause generation for as long as the store "
            "takes; set the mode to 'shadow' or 'delta'"
        )


def _alone(spec: RunSpec, lora: LoraSpec) -> Iterator[str]:
    """Yields reasons why adapters cannot be sent without their base weights."""
    if MODES[spec.weight_sync.mode].is_in_place:
        yield (
            "trainer.lora.sync adapter receives adapters in separate memory, but weight_sync.mode is "
            "inplace; use mode shadow, which takes no more memory here, or sync merged"
        )
    if lora.adapts_experts:
        yield (
            "with trainer.lora.sync adapter, rollouts merge adapters of linear modules only, but "
            "trainer.lora.target_modules has experts; use sync merged"
        )
    if spec.model.is_tiny:
        yield (
            f"with trainer.lora.sync adapter, rollouts read frozen weights from model.path, but "
            f"{spec.model.path!r} is a preset without a folder; use sync merged"
        )
    for role, kind in kinds_with_own_gpus(spec.topology).items():
        if kind.receives_weights and not kind.merges_adapters:
            yield (
                f"workers of the role {role} cannot merge adapters, as trainer.lora.sync adapter requires; "
                "use sync merged"
            )


def problems(spec: RunSpec) -> Iterator[str]:
    """Yields all problems across keys of a specification whose keys are valid by themselves."""
    return chain.from_iterable(rule(spec) for rule in _RULES)


def _rewards(spec: RunSpec) -> Iterator[str]:
    are_scored = all(dataset.rewards for dataset in spec.data.train_sets.values())
    needs_none = spec.algorithm.num_demonstrations or spec.algorithm.advantage == "none"
    if not (spec.rollout.rewards or are_scored or needs_none):
        yield (
            "rollout.rewards is required: expected at least 1 reward for the sampled responses, "
            "for example [{name: exact_match}]"
        )
    for key, rewards in spec.rewards.items():
        if key == "rollout.rewards":
            prompt_sets = [
                dataset for dataset in spec.data.sets.values() if dataset.rewards is None
            ]
            has_answers = all(
                spec.data.answer_column_of(dataset) is not None for dataset in prompt_sets
            )
        else:
            dataset = spec.data.sets[key.removeprefix("data.").removesuffix(".rewards")]
            has_answers = spec.data.answer_column_of(dataset) is not None
        yield from _rewards_of(key, rewards, has_answers=has_answers)
        yield from _missing_scores(key, rewards, spec)
        slots, size = spec.rollout.max_running_samples, spec.samples_per_group
        if size > slots and (
            compared := [item.name for item in rewards if item.sees != "response"]
        ):
            yield (
                f"{key}: {compared[0]!r} compares the responses of a group, but a group of {size} is split "
                f"over several rollouts; set rollout.max_running_samples ({slots}) to at "
                f"least {size}"
            )


_MAX_HOST_BYTES = 253


def _rewards_of(
    list_key: str, rewards: Sequence[RewardSpec], *, has_answers: bool
) -> Iterator[str]:
    names = (*REWARDS, EARNED)
    schemes = ", ".join(f"{scheme}://" for scheme in REWARD_SERVICES)
    for index, reward in enumerate(rewards):
        key = f"{list_key}.{index}"
        if is_service(reward.name):
            yield from _address(f"{key}.name", reward.name)
        elif reward.name not in names and not is_reference(reward.name):
            yield (
                f"{key}.name: {reward.name!r} is not a known reward; use one of {', '.join(names)}, the URL "
                f"of a reward service ({schemes}), or 'module:function' or 'file.py:function'."
                + did_you_mean(reward.name, names)
            )
        if is_service(reward.name) and (unknown := sorted(reward.arguments.keys() - {"token"})):
            yield (
                f"{key}.arguments has {', '.join(unknown)}, but a reward service accepts only token; "
                "remove the others"
            )
        if reward.name in NEED_ANSWERS and not has_answers:
            yield (
                f"{key}.name: {reward.name!r} compares with the expected answer, but data.answer_column is "
                "null; set the column, or use another reward"
            )
        if reward.sees != "response" and ("://" in reward.name or ":" not in reward.name):
            yield (
                f"{key}.sees is {reward.sees!r}, which is only for your own functions, but {key}.name is "
                f"{reward.name!r}; use 'module:function', or remove {key}.sees"
            )
        field_names = {field.name for field in FIELDS}
        if reward.column is not None and (reward.per == "response" or reward.column in field_names):
            cause = (
                "it is a field of every sample"
                if reward.column in field_names
                else "per is 'response'"
            )
            yield (
                f"{key}.column is {reward.column!r}, but {cause}; use another name, and set {key}.per to "
                "'token' or 'turn'"
            )
        if reward.per != "response" and (reward.sees != "response" or ":" not in reward.name):
            yield (
                f"{key}.per is {reward.per!r}, which is only for your own functions and for services that "
                f"score one response, but {key}.name is {reward.name!r} and {key}.sees {reward.sees!r}; "
                "change one"
            )
        if reward.bounds is not None and reward.bounds[0] >= reward.bounds[1]:
            yield (
                f"{key}.bounds must be [min, max], got [{reward.bounds[0]:g}, "
                f"{reward.bounds[1]:g}]; swap them"
            )


def _store_urls(spec: RunSpec) -> Iterator[str]:
    """Yields the URLs that no store can have, or that contain credentials."""
    for key in url_keys(spec.model_dump(mode="json")):
        if problem := url_problem(key.url):
            yield f"{key.key}: {without_secrets(key.url)!r} {problem}"


def _services(spec: RunSpec) -> Iterator[str]:
    """Yields problems of the addresses of teachers, agents and environments."""
    urls = {"teacher.url": spec.teacher.url} if spec.teacher is not None else {}
    for split, dataset in spec.data.sets.items():
        urls[f"data.{split}.teacher_url"] = getattr(dataset, "teacher_url", None)
    if (workflow := spec.rollout.workflow) in ("agent", "environment"):
        urls[f"rollout.workflow_arguments.{workflow}"] = spec.rollout.workflow_arguments.get(
            workflow
        )
    for key, url in urls.items():
        if isinstance(url, str) and "://" in url:
            yield from _address(key, plain_url(url))


def _address(key: str, url: str) -> Iterator[str]:
    """Yields a problem if a service's address is incomplete."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # UnicodeError, which is a ValueError
        is_whole = 0 < len(host) <= _MAX_HOST_BYTES and (parts.port or not url.startswith("grpc"))
        is_whole = is_whole and url.isprintable() and " " not in url
    except ValueError:
        is_whole = False
    if not is_whole:
        yield (
            f"{key}: expected the URL of a service, http://HOST/PATH or grpc://HOST:PORT, got {url!r}"
        )


def _missing_scores(key: str, rewards: Sequence[RewardSpec], spec: RunSpec) -> Iterator[str]:
    """Yields problems of rewards whose scores would all be 0, or would never exist."""
    workflow = spec.rollout.workflow
    if rewards and not any(reward.weight for reward in rewards):
        yield (
            f"{key}.0.weight is 0, as are all other weights, so every score would be 0; raise it"
        )
    for index, reward in enumerate(rewards):
        if reward.name == EARNED and workflow in ("single_turn", "multi_turn"):
            yield (
                f"{key}.{index}.name: {EARNED!r} is the score of an environment or an agent for its episode, "
                f"but rollout.workflow is {workflow!r}; set it to 'environment' or 'agent', or use another "
                "reward"
            )


def _rollout(spec: RunSpec) -> Iterator[str]:
    rollout, sampling = spec.rollout, spec.rollout.sampling
    if rollout.workflow not in WORKFLOWS and not is_reference(rollout.workflow):
        yield (
            f"rollout.workflow: {rollout.workflow!r} is not a known workflow; use one of "
            f"{', '.join(WORKFLOWS)}, or 'module:Class' or 'file.py:Class'."
            + did_you_mean(rollout.workflow, tuple(WORKFLOWS))
        )
    if rollout.segment_tokens is not None and not rollout.partial_rollout:
        yield (
            f"rollout.segment_tokens is {rollout.segment_tokens} but rollout.partial_rollout is false; set "
            "it to true, or remove rollout.segment_tokens"
        )
    elif (rollout.segment_tokens or 0) >= rollout.max_response_tokens:
        yield (
            f"rollout.segment_tokens ({rollout.segment_tokens}) must be below rollout.max_response_tokens "
            f"({rollout.max_response_tokens}), or no response is ever parked; lower or remove it"
        )
    if "" in sampling.stop:
        yield "rollout.sampling.stop has an empty string, which would end every response; remove it"
    overlong = spec.algorithm.overlong.buffer_tokens
    if overlong > rollout.max_response_tokens:
        yield (
            f"algorithm.overlong.buffer_tokens ({overlong}) must not exceed rollout.max_response_tokens "
            f"({rollout.max_response_tokens}), the length limit at which the penalty ends; lower it"
        )


def _sandbox(spec: RunSpec) -> Iterator[str]:
    sandbox, workflow = spec.rollout.sandbox, spec.rollout.workflow
    if sandbox is None:
        return
    if workflow in ("single_turn", "multi_turn"):
        yield (
            f"rollout.sandbox is set, but rollout.workflow {workflow!r} does not use it; remove it, or use "
            "'agent', 'environment' or your own class"
        )
    if sandbox.kind not in ("bubblewrap", "e2b") and not (sandbox.image or sandbox.image_column):
        yield (
            f"rollout.sandbox.image is required with rollout.sandbox.kind {sandbox.kind!r}; set the name of "
            "an image, or image_column"
        )
    if sandbox.kind != "bubblewrap" and sandbox.image and not IMAGE.fullmatch(sandbox.image):
        yield (
            "rollout.sandbox.image must be the name of an image, such as 'python:3.12', got "
            f"{sandbox.image!r}"
        )
    if sandbox.kind == "bubblewrap" and sandbox.image_column is not None and not sandbox.image:
        yield (
            "rollout.sandbox.image_column names folders inside rollout.sandbox.image, which is empty; set it"
        )
    system = [path for path in sandbox.folders if path.split("/")[1] in ("dev", "proc", "sys")]
    if system:
        yield (
            f"rollout.sandbox.folders has {system[0]!r}, where the sandbox has file systems of the kernel; "
            "name another folder"
        )
    secret_names = {"api_key"} if sandbox.kind == "e2b" else set[str]()
    if unknown := sorted(sandbox.arguments.keys() - secret_names):
        yield (
            f"rollout.sandbox.arguments has {unknown[0]!r}, but rollout.sandbox.kind {sandbox.kind!r} takes "
            f"{sorted(secret_names) or 'none'}; remove it"
        )
    if sandbox.kind == "e2b" and "api_key" not in sandbox.arguments:
        yield (
            "rollout.sandbox.arguments.api_key is required with rollout.sandbox.kind 'e2b'; set it to "
            '{"secret": "NAME"}, where NAME is a file in the installation\'s secrets directory'
        )
    if workflow == "environment":
        yield from _sandbox_of_server(spec.rollout.workflow_arguments.get("environment"))


def _sandbox_of_server(environment: object) -> Iterator[str]:
    """Yields a problem if a server of environments cannot use the sandboxes of its episodes."""
    try:
        kind = environment_kind(environment)
    except DoorError as error:
        yield f"rollout.workflow_arguments.environment: {error}"
        return
    if kind is not None and not kind.passes_sandbox:
        yield (
            f"rollout.sandbox is set, but the {kind.title} server {environment!r} cannot use it; remove it"
        )


def _sampling(spec: RunSpec) -> Iterator[str]:
    rollout, sampling = spec.rollout, spec.rollout.sampling
    key = f"rollout.sampling.{'top_k' if sampling.top_k else 'top_p'}"
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature is 0 (greedy), so all responses of a group would be equal; "
            "set it above 0"
        )
    if sampling.is_truncated and spec.algorithm.num_demonstrations:
        yield (
            f"{key} excludes tokens, but algorithm.loss {spec.algorithm.loss!r} learns the answers of "
            "data.train and samples no responses; remove it"
        )
    elif sampling.is_truncated and not engine_kind(rollout.engine).reports_masks:
        able = [name for name, kind in ENGINES.items() if kind.reports_masks]
        yield (
            f"{key} excludes tokens, but the adapter of "
            f"engine {rollout.engine!r} does not report which, so that the trainer's logprobs would be those "
            f"of another distribution; set top_p to 1 and top_k to 0, or rollout.engine to {', '.join(able)}"
        )
    elif (
        sampling.is_truncated
        and rollout.speculation is not None
        and not engine_kind(rollout.engine).reports_masks_with_speculation
    ):
        yield (
            f"{key} excludes tokens, and engine {rollout.engine!r} does not report which with "
            "rollout.speculation; set that to null, or top_p to 1 and top_k to 0"
        )
    elif sampling.top_p < 1 and sampling.top_k == 0:
        yield (
            f"rollout.sampling.top_p is {sampling.top_p:g} and top_k 0, so up to the whole vocabulary would "
            "be stored for each token; set rollout.sampling.top_k, for example to 512, as a bound"
        )


def _engine(spec: RunSpec) -> Iterator[str]:
    name, rollout, sync = spec.rollout.engine, spec.rollout, spec.weight_sync
    engines, has_others = MODES[sync.mode].engines, spec.sends_adapters or spec.topology.task_groups
    if engines and (name not in engines or has_others or sync.backend not in ("auto", sync.mode)):
        yield (
            f"weight_sync.mode {sync.mode} sends whole weights to the servers of rollout.engine "
            f"{' or '.join(engines)}, by its own backend: no adapters, and to no other worker; set it to "
            f"{HOST_MODE}, or weight_sync.backend to auto"
        )
    if MODES[spec.weight_sync.mode].is_in_place:
        stages = engine_kind(name).stage_argument
        if not engine_kind(name).is_writable:
            yield (
                f"weight_sync.mode inplace writes into live weights, which engine {name!r} does not expose; "
                "use mode shadow, or another rollout.engine"
            )
        elif rollout.engine_arguments.get(stages, 1) != 1:
            yield (
                "with weight_sync.mode inplace every worker of an engine writes all tensors, but with "
                f"rollout.engine_arguments.{stages} each worker has only some layers; use mode shadow, or "
                "remove it"
            )
    if engine_kind(name).is_remote:
        yield from _elsewhere(spec)
    yield from _invariance(spec)
    yield from _quantization(spec)
    if rollout.speculation is not None:
        yield from _speculation(spec, rollout.speculation)
    most_tokens = spec.data.max_prompt_tokens + rollout.max_response_tokens
    try:
        engine_kind(name).check(rollout.engine_arguments, most_tokens=most_tokens)
    except ValueError as error:
        yield str(error)


def _elsewhere(spec: RunSpec) -> Iterator[str]:
    """Yields problems of an engine in servers that run separately."""
    name = spec.rollout.engine
    mode = MODES[spec.weight_sync.mode]
    if not (mode.through_host or mode.engines):
        yield (
            f"weight_sync.mode is {spec.weight_sync.mode}, but rollouts with engine {name!r} have no GPU, so "
            f"that weights reach them through host memory; set it to {HOST_MODE}"
        )
    lacking = {
        "rollout.kv_policy": ("keep", spec.rollout.kv_policy == "keep", "recompute"),
        "rollout.routing_replay": (
            spec.rollout.routing_replay,
            spec.rollout.routing_replay != "off",
            "'off'",
        ),
        "model.images": ("true", spec.model.images and not engine_kind(name).takes_images, "false"),
        "data.model_inputs_column": (
            spec.data.model_inputs_column,
            spec.data.model_inputs_column is not None,
            "null",
        ),
    }
    for key, (value, is_set, instead) in lacking.items():
        if is_set:
            yield f"{key} is {value}, which engine {name!r} does not support; set it to {instead}"
    if spec.topology.task_groups or spec.topology.is_colocated:
        yield (
            f"topology shares this installation's GPUs between the trainer and rollouts, but the engine "
            f"{name!r} has its own elsewhere; remove topology.task_groups and topology.placement"
        )
    if spec.rollout.replicas != 1:
        yield (
            f"rollout.replicas is {spec.rollout.replicas}, but one rollout attaches to all servers of engine "
            f"{name!r}; set it to 1, and add servers to rollout.engine_arguments.addresses"
        )


def _invariance(spec: RunSpec) -> Iterator[str]:
    name, rollout = spec.rollout.engine, spec.rollout
    if rollout.reproducible != "batch_invariant":
        return
    if engine_kind(name).invariant_environment is None:
        yield (
            f"rollout.reproducible is batch_invariant, which engine {name!r} does not support; use "
            "torch, vllm or sglang, or set rollout.reproducible to true"
        )
    elif name == "torch" and spec.data.model_inputs_column is not None:
        yield (
            "rollout.reproducible is batch_invariant, which engine 'torch' does not support with "
            "data.model_inputs_column; set rollout.reproducible to true, or remove the column"
        )
    try:
        engine = spec.computes_as
    except ValueError:
        return  # the engine's own check reports it
    if engine == "vllm":
        for argument in sorted(_CHANGE_OPERATORS & rollout.engine_arguments.keys()):
            yield (
                f"rollout.engine_arguments.{argument} would give vLLM other operators than the trainer, but "
                "rollout.reproducible is batch_invariant; remove one of them"
            )


_CHANGE_OPERATORS: Final = {
    "compilation_config",
    "hf_overrides",
    "attention_backend",
    "attention_config",
    "kernel_config",
}
"""Arguments of vLLM that choose its operators."""


def _quantization(spec: RunSpec) -> Iterator[str]:
    name, rollout = spec.rollout.engine, spec.rollout
    kind = engine_kind(name)
    for key, value, supported, why in (
        ("quantization", rollout.quantization, kind.quantizations, kind.why_unquantized),
        ("kv_cache_dtype", rollout.kv_cache_dtype, kind.cache_dtypes, ""),
    ):
        if value is not None and value not in supported:
            able = [
                engine for engine, entry in ENGINES.items() if value in getattr(entry, _TABLES[key])
            ]
            yield (
                f"rollout.{key} is {value!r}, which engine {name!r} does not support"
                + (f": {why}" if why else "")
                + f"; use {' or '.join(able)}, or remove it"
            )
    if not rollout.is_quantized:
        return
    if rollout.reproducible == "batch_invariant":
        yield (
            "rollout.reproducible is batch_invariant, but rollout.quantization or kv_cache_dtype gives the "
            "engine another precision than the trainer's; remove one of them"
        )
    is_uncorrected = spec.algorithm.correction == "none" and spec.algorithm.score_centering is None
    if is_uncorrected and spec.algorithm.num_demonstrations == 0:
        yield (
            "algorithm.correction is 'none', but with rollout.quantization or kv_cache_dtype the policy that "
            "samples is not the one that trains; set it to 'auto'"
        )


_TABLES: Final = {"quantization": "quantizations", "kv_cache_dtype": "cache_dtypes"}


def _speculation(spec: RunSpec, speculation: SpeculationSpec) -> Iterator[str]:
    name, method = spec.rollout.engine, speculation.method
    kind = engine_kind(name)
    if method not in kind.speculation:
        choices = " or ".join(map(repr, kind.speculation))
        yield (
            f"rollout.speculation.method is {method!r}, which engine {name!r} does not support; "
            + (f"set it to {choices}, " if choices else "")
            + "or set rollout.speculation to null"
        )
        return
    if speculation.prompt_lookup_min > speculation.prompt_lookup_max:
        yield (
            f"rollout.speculation.prompt_lookup_min is {speculation.prompt_lookup_min}, above "
            f"prompt_lookup_max, {speculation.prompt_lookup_max}; lower it, or raise prompt_lookup_max"
        )
    has_head = method in ("mtp", "eagle")
    if method == "eagle" and speculation.model is None:
        yield (
            "rollout.speculation.method is 'eagle', but rollout.speculation.model is null; set it to the "
            "folder or Hub id of the EAGLE head"
        )
    elif speculation.model is not None and not has_head:
        yield (
            f"rollout.speculation.model is set, but method {method!r} has no model; remove it, or set the "
            "method to 'eagle' or 'mtp'"
        )
    if has_head and spec.topology.placement != "disaggregated":
        yield (
            f"rollout.speculation.method {method!r} needs a head in GPU memory, which engine {name!r} does "
            "not restore after the trainer has used the GPU; set topology.placement to 'disaggregated', or "
            "the method to 'ngram'"
        )
    if kind.speculates_with_seeds:
        return
    if spec.rollout.reproducible:
        yield (
            f"rollout.reproducible is set, but with rollout.speculation the tokens of engine {name!r} depend "
            "on which steps have proposals; set one of them to false or null, or rollout.engine to 'torch'"
        )
    if spec.rollout.routing_replay != "off":
        yield (
            f"rollout.routing_replay is {spec.rollout.routing_replay!r}, but with rollout.speculation engine "
            f"{name!r} may report experts of rejected tokens; set it to 'off', or rollout.speculation to null"
        )


def _argument_problems(
    key: str, name: str, formula: Formula, arguments: Mapping[str, Any]
) -> Iterator[str]:
    keys = tuple(formula.arguments.model_fields)
    try:
        formula.resolve(arguments)
    except ValidationError as error:
        for problem in error.errors():
            argument = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                settings = ", ".join((*keys, *(f"algorithm.{item}" for item in formula.keys)))
                yield (
                    f"{key}_arguments.{argument} is unknown; the settings of {name!r} are "
                    f"{settings or 'none'}" + did_you_mean(argument, keys)
                )
            elif problem["type"] == "missing":
                meaning = formula.arguments.model_fields[argument].description or ""
                yield (
                    f"{key}_arguments.{argument} is required with {name!r}, but missing; set it: "
                    + " ".join(meaning.replace("``", "").split())
                )
            else:
                yield f"{key}_arguments.{argument}: {problem['msg']}, got {problem['input']!r}"


def _formulas(spec: RunSpec) -> Iterator[str]:
    algorithm = spec.algorithm
    for key, name, table, arguments in (
        ("advantage", algorithm.advantage, ADVANTAGES, algorithm.advantage_arguments),
        ("loss", algorithm.loss, LOSSES, algorithm.loss_arguments),
    ):
        if name not in table and not is_reference(name):
            yield (
                f"algorithm.{key} {name!r} is unknown; use one of {', '.join(table)}, or your own "
                "function, 'module:function' or 'file.py:function'."
                + did_you_mean(name, tuple(table))
            )
        if name in table:
            yield from _argument_problems(f"algorithm.{key}", name, table[name], arguments)
            yield from _keys_of_others(algorithm, key, name, table)
    subtracted = {
        "algorithm.overlong.buffer_tokens": algorithm.overlong.buffer_tokens > 0,
        "algorithm.kl.placement 'reward'": algorithm.kl.coefficient > 0
        and algorithm.kl.placement == "reward",
    }
    if algorithm.advantage == "gdpo" and any(subtracted.values()):
        yield (
            f"{next(key for key, is_set in subtracted.items() if is_set)} changes the reward, but "
            "algorithm.advantage 'gdpo' uses the rewards' terms; remove it, or return its value as a term"
        )
    if spec.critic != CriticSpec() and not algorithm.advantage_kind.needs_critic:
        yield (
            f"critic is set, but algorithm.advantage {algorithm.advantage!r} has no critic; remove critic, "
            "or set algorithm.advantage to 'gae'"
        )
    if spec.trainer.steps is not None:
        yield from critic_warmup(spec, num_steps=spec.trainer.steps)


def critic_warmup(spec: RunSpec, *, num_steps: int) -> Iterator[str]:
    """Yields a problem if all steps of a run would train only the critic.

    Args:
        num_steps: Steps of the whole run; with ``data.epochs`` they are known after the data is opened.
    """
    if spec.critic.warmup_steps >= num_steps:
        length = "trainer.steps" if spec.trainer.steps is not None else "the steps of data.epochs"
        yield (
            f"critic.warmup_steps ({spec.critic.warmup_steps}) must be below {length} ({num_steps}), or the "
            "policy would never be trained; lower the first or raise the second"
        )


def _keys_of_others(
    algorithm: AlgorithmSpec, key: str, name: str, table: Mapping[str, Formula]
) -> Iterator[str]:
    """Yields keys of ``algorithm`` that only other formulas of a table use."""
    if algorithm.num_demonstrations:
        return  # reported with all other keys
    plain, formula_entry = AlgorithmSpec(loss=algorithm.loss), table[name]
    users: dict[str, list[str]] = {}
    for user, formula in table.items():
        for item in formula.keys:
            users.setdefault(item, []).append(user)
    for item, users_of_key in users.items():
        value = getattr(algorithm, item)
        if item in formula_entry.keys or value == getattr(plain, item):
            continue
        also = (
            f", or set algorithm.{key}_arguments.{item}"
            if item in formula_entry.arguments.model_fields
            else ""
        )
        yield (
            f"algorithm.{item} is {value}, but has no effect with algorithm.{key} {name!r}; it is a key of "
            f"{', '.join(users_of_key)}. Remove it{also}"
        )


def _correction(spec: RunSpec) -> Iterator[str]:
    algorithm = spec.algorithm
    is_sampled = algorithm.num_demonstrations == 0
    is_uncorrected = algorithm.correction == "none" and algorithm.score_centering is None
    if is_uncorrected and algorithm.max_staleness > 0 and is_sampled:
        yield (
            f"algorithm.correction is 'none' but algorithm.max_staleness is {algorithm.max_staleness}: "
            "training on stale samples without a correction loses accuracy; set algorithm.correction to "
            "'auto' or algorithm.max_staleness to 0"
        )
    if algorithm.proximal == "interpolated" and spec.correction != "decoupled":
        yield (
            f"algorithm.proximal is 'interpolated', but algorithm.correction {spec.correction!r} has "
            "no proximal policy; set algorithm.correction to 'decoupled'"
        )
    if algorithm.correction_normalize and spec.correction != "decoupled":
        yield (
            f"algorithm.correction_normalize is true, but algorithm.correction {spec.correction!r} computes "
            "its weights during training; set algorithm.correction to 'decoupled'"
        )
    if algorithm.looks_ahead and algorithm.proximal == "interpolated":
        yield (
            "algorithm.proximal 'interpolated' depends on the policy during training, but "
            "algorithm.correction_normalize and rejection_denominator 'kept' need the whole batch before "
            "training; set algorithm.proximal to 'computed'"
        )
    if algorithm.correction_normalize and spec.trainer.accumulate_early:
        yield (
            "algorithm.correction_normalize needs the whole batch before training, but "
            "trainer.accumulate_early trains groups as they finish; remove one of them"
        )
    if algorithm.rejection_denominator == "kept" and not algorithm.rejections:
        yield (
            "algorithm.rejection_denominator is 'kept', but algorithm.rejection is empty and "
            "algorithm.opsm null; add a mask, or "
            "remove algorithm.rejection_denominator"
        )
    for index, mask in enumerate(algorithm.rejection):
        key = f"algorithm.rejection.{index}"
        if mask.lower is None and mask.upper is None:
            yield f"{key} has no bounds; set {key}.lower, {key}.upper or both, or remove it"
        elif mask.lower is not None and mask.upper is not None and mask.lower >= mask.upper:
            yield f"{key}.lower ({mask.lower:g}) must be below {key}.upper ({mask.upper:g})"


def _score_centering(spec: RunSpec) -> Iterator[str]:
    """Yields problems of score centering with the loss, the other corrections and the engine."""
    algorithm, engine = spec.algorithm, spec.rollout.engine
    if algorithm.score_centering is None:
        return
    key = f"algorithm.score_centering is {algorithm.score_centering}"
    if algorithm.loss != "reinforce":
        yield (
            f"{key}, but algorithm.loss {algorithm.loss!r} has no score to center: its gradient is clipped, "
            "or is not that of a logprob; set algorithm.loss to 'reinforce', or remove "
            "algorithm.score_centering"
        )
    if spec.correction == "decoupled":
        yield (
            f"{key}, but the weights of algorithm.correction 'decoupled' need proximal logprobs of tokens "
            "that were not drawn; set algorithm.correction to 'bypass', or to 'none' for no weights"
        )
    if algorithm.correction_level != "token" and spec.correction == "bypass":
        yield (
            f"{key}, but with algorithm.correction_level {algorithm.correction_level!r} the weight of a "
            "token that was not drawn is not known; set it to 'token'"
        )
    for index, mask in enumerate(algorithm.rejection):
        if mask.level == "token":
            yield (
                f"{key}, but algorithm.rejection.{index} excludes single tokens, so that the scores of the "
                "others are not centered; set its level to that of a sequence, or use "
                "algorithm.correction_cap_mode 'mask', which composes with score centering"
            )
    if not engine_kind(engine).reports_top_logprobs:
        able = [name for name, kind in ENGINES.items() if kind.reports_top_logprobs]
        yield (
            f"{key}, but the adapter of engine {engine!r} does not report the most likely tokens; set "
            f"rollout.engine to {', '.join(able)}"
        )


def _without_effect(spec: RunSpec) -> Iterator[str]:
    """Yields keys that have no effect, because another key disables what they configure."""
    algorithm, rollout, topology = spec.algorithm, spec.rollout, spec.topology
    is_shown = algorithm.num_demonstrations > 0
    taught = spec.teacher or TeacherSpec()
    is_apart = any("critic" in group and "train" not in group for group in topology.task_groups)
    for key, is_used, condition in (
        ("data.demonstration", is_shown, "algorithm.loss 'sft', 'dpo' or 'reward_model'"),
        (
            "data.rejected_column",
            algorithm.num_demonstrations > 1,
            "algorithm.loss 'dpo' or 'reward_model'",
        ),
        ("data.chat_template_arguments", spec.data.chat_template, "data.chat_template true"),
        ("rollout.max_segments", rollout.partial_rollout, "rollout.partial_rollout true"),
        ("rollout.unquantized_layers", rollout.quantization, "rollout.quantization"),
        (
            "rollout.max_mismatch",
            rollout.is_quantized,
            "rollout.quantization or rollout.kv_cache_dtype",
        ),
        (
            "algorithm.correction_floor",
            algorithm.correction_cap_mode == "mask",
            "algorithm.correction_cap_mode 'mask'",
        ),
        (
            "algorithm.value_clip",
            algorithm.advantage_kind.needs_critic or is_shown,
            "algorithm.advantage 'gae'",
        ),
        *(
            (f"critic.{key}", is_apart, "a group of critic in topology.task_groups")
            for key in CriticSpec.LAYOUT
        ),
        (
            "algorithm.entropy_step",
            algorithm.entropy_target or is_shown,
            "algorithm.entropy_target",
        ),
        ("algorithm.kl.target", algorithm.kl.coefficient, "algorithm.kl.coefficient above 0"),
        ("teacher.server", spec.teacher_urls, "teacher.url"),
        ("teacher.timeout_s", spec.teacher_urls, "teacher.url"),
        ("teacher.concurrency", spec.teacher_urls, "teacher.url"),
        ("trainer.loss_scale", spec.trainer.dtype == "float16", "trainer.dtype float16"),
        ("teacher.min_reward", taught.demonstration is not None, "teacher.demonstration"),
        (
            "rollout.sandbox.loopback",
            rollout.sandbox is None or rollout.sandbox.kind == "bubblewrap",
            "rollout.sandbox.kind 'bubblewrap'",
        ),
    ):
        if is_used:
            continue
        *path, name = key.split(".")
        section = reduce(getattr, path, spec) or TeacherSpec()
        value = getattr(section, name)
        if value != type(section).model_fields[name].get_default(call_default_factory=True):
            text = repr(value) if isinstance(value, str | int | float) else "set"
            yield f"{key} is {text}, but has no effect without {condition}; remove it, or set that"
    if algorithm.correction_floor >= algorithm.correction_cap:
        yield (
            f"algorithm.correction_floor ({algorithm.correction_floor:g}) must be below "
            f"algorithm.correction_cap ({algorithm.correction_cap:g}), or every token would be excluded"
        )
    if taught.demonstration is not None and "{response}" not in taught.demonstration:
        yield (
            f"teacher.demonstration must contain '{{response}}', but is {taught.demonstration!r}; add "
            "'{response}' at the place of the demonstrated response"
        )


def _batch(spec: RunSpec) -> Iterator[str]:
    trainer = spec.trainer
    if trainer.updates_per_step > trainer.prompts_per_step:
        yield (
            f"trainer.updates_per_step ({trainer.updates_per_step}) must not exceed "
            f"trainer.prompts_per_step ({trainer.prompts_per_step}), because each mini-batch needs a group"
        )
    if beyond := [step for step in trainer.profile_steps if step > (trainer.steps or step)]:
        yield (
            f"trainer.profile_steps has {beyond}, but trainer.steps is {trainer.steps}; use steps from 1 to "
            f"{trainer.steps}"
        )
    yield from _groups(spec)
    if not all(0 <= beta < 1 for beta in trainer.optimizer.betas):
        yield (
            f"trainer.optimizer.betas must be >= 0 and < 1, got {list(trainer.optimizer.betas)}; "
            "for example [0.9, 0.99]"
        )
    if spec.validation.replicas >= spec.rollout.replicas:
        yield (
            f"validation.replicas ({spec.validation.replicas}) must be below rollout.replicas "
            f"({spec.rollout.replicas}), so that the others can generate meanwhile; 0 uses all replicas for "
            "both"
        )


def _groups(spec: RunSpec) -> Iterator[str]:
    """Yields problems of settings with which no group could train."""
    algorithm, size = spec.algorithm, spec.rollout.group_size
    least = algorithm.min_group_size
    is_sampled = algorithm.num_demonstrations == 0
    if algorithm.advantage_kind.compares_members and size == 1 and is_sampled:
        other_advantages = [
            name
            for name, kind in ADVANTAGES.items()
            if not kind.compares_members and name not in ("none", "uniform")
        ]
        yield (
            f"rollout.group_size is 1, but algorithm.advantage {algorithm.advantage!r} compares the "
            "responses of a group, so every advantage would be 0; raise it, or set algorithm.advantage to "
            f"one of {', '.join(other_advantages)}, and algorithm.min_group_size to 1"
        )
    elif size < least:
        yield (
            f"rollout.group_size ({size}) is below algorithm.min_group_size ({least}), so no "
            "group could ever be trained; raise the first or lower the second"
        )
    yield from _dynamic_sampling(spec)
    if size == 1 and spec.teacher is not None and spec.teacher.demonstration is not None:
        yield (
            "teacher.demonstration shows the best other response of a group, but rollout.group_size is 1, "
            "so no response would train; raise rollout.group_size"
        )


def _dynamic_sampling(spec: RunSpec) -> Iterator[str]:
    """Yields reasons why dynamic sampling cannot distinguish the groups that train."""
    algorithm, size = spec.algorithm, spec.rollout.group_size
    if not algorithm.dynamic_sampling:
        return
    if size == 1 or not spec.is_rewarded:
        cause = "rollout.group_size is 1" if size == 1 else "no sample that trains has a reward"
        yield (
            f"algorithm.dynamic_sampling replaces groups whose rewards are all equal, but {cause}, so it "
            "would replace every group; remove it"
        )
    begins = "algorithm.dynamic_sampling replaces groups whose advantages are all 0"
    if algorithm.advantage_kind.idle_groups is None:
        other_advantages = [name for name, kind in ADVANTAGES.items() if kind.idle_groups]
        yield (
            f"{begins}, which does not follow from the rewards of a group with algorithm.advantage "
            f"{algorithm.advantage!r}; remove it, or set algorithm.advantage to one of "
            f"{', '.join(other_advantages)}"
        )
    if algorithm.kl.coefficient > 0 and algorithm.kl.placement == "reward":
        yield (
            f"{begins}, but with algorithm.kl.placement 'reward' groups of equal rewards train too; remove "
            "it, or set algorithm.kl.placement to 'loss'"
        )


def _early_groups(spec: RunSpec) -> Iterator[str]:
    if not spec.trainer.accumulate_early:
        return
    begins = "trainer.accumulate_early accumulates one on-policy update from groups, but"
    algorithm, updates = spec.algorithm, spec.trainer.updates_per_step
    if algorithm.max_staleness:
        yield f"{begins} algorithm.max_staleness is {algorithm.max_staleness}; set it to 0"
    if updates > 1:
        yield f"{begins} trainer.updates_per_step is {updates}; set it to 1"
    if not algorithm.advantage_kind.is_per_group:
        yield (
            f"{begins} algorithm.advantage {algorithm.advantage!r} may compare samples of different groups; "
            f"use one of {', '.join(name for name, kind in ADVANTAGES.items() if kind.is_per_group)}"
        )


def parallelism(spec: RunSpec) -> Iterator[str]:
    """Yields problems of the trainer's processes and of weights that they hold."""
    trainer, lora = spec.trainer, spec.trainer.lora
    together = trainer.tensor_parallel * trainer.context_parallel * trainer.pipeline_parallel
    if trainer.world_size % together:
        also = "".join(
            f" times trainer.{key} ({size})"
            for key in ("context_parallel", "pipeline_parallel")
            if (size := getattr(trainer, key)) > 1
        )
        yield (
            f"trainer.world_size ({trainer.world_size}) must be a multiple of "
            f"trainer.tensor_parallel ({trainer.tensor_parallel}){also}"
        )
    data_parallel = trainer.stage_ranks // trainer.tensor_parallel
    if data_parallel % trainer.expert_parallel:
        stages = " / trainer.pipeline_parallel" if trainer.pipeline_parallel > 1 else ""
        yield (
            f"trainer.expert_parallel is {trainer.expert_parallel}, which does not divide the "
            f"{data_parallel} data-parallel processes (trainer.world_size / trainer.tensor_parallel"
            f"{stages}); set it to a divisor"
        )
    if trainer.zero_stage == 1 and trainer.offloads_weights:
        yield (
            "trainer.zero_stage 1 keeps whole weights on the GPU, but trainer.cpu_offload true moves them to "
            "the host; set trainer.zero_stage to 3 or trainer.cpu_offload to false or optimizer"
        )
    if trainer.keep_gathered is False and not trainer.may_free_gathered:
        yield (
            "trainer.keep_gathered false is for a process that shards with no other and trains all weights "
            "on its GPU, without trainer.lora, cpu_offload true and zero_stage 1; set it to auto"
        )
    if trainer.keep_gathered is True and not trainer.keeps_gathered:
        yield (
            "trainer.keep_gathered true is for a process that shards with no other, but trainer.world_size "
            f"is {trainer.world_size}; set it to auto, or trainer.zero_stage to 1 to keep gathered weights"
        )
    if lora is not None and trainer.tensor_parallel > 1:
        yield (
            f"trainer.lora cannot be combined with trainer.tensor_parallel {trainer.tensor_parallel}; "
            "set trainer.tensor_parallel to 1 and shard over more data-parallel ranks"
        )
    if lora is not None and lora.base_dtype is not None:
        yield from _quantized_base(spec, lora.base_dtype)
    if lora is not None and lora.target_modules == ():
        yield (
            "trainer.lora.target_modules is empty, so nothing would be trained; remove the key to adapt all "
            "linear modules, or add modules such as q_proj"
        )


def _quantized_base(spec: RunSpec, base_dtype: str) -> Iterator[str]:
    trainer = spec.trainer
    if trainer.world_size > 1 and trainer.zero_stage == 3:
        yield (
            f"trainer.lora.base_dtype {base_dtype} keeps the whole base on each GPU, but trainer.zero_stage "
            f"3 shards it over {trainer.world_size}; set trainer.zero_stage to 1"
        )
    if trainer.offloads_weights:
        yield (
            f"trainer.lora.base_dtype {base_dtype} keeps the base on the GPU, but trainer.cpu_offload true "
            "moves it to the host; set trainer.cpu_offload to false or optimizer"
        )
    if spec.model.is_tiny:
        yield (
            f"trainer.lora.base_dtype {base_dtype} rounds the weights of model.path, but {spec.model.path!r} "
            "is a preset without a folder; use a folder or a Hugging Face id, or remove the key"
        )


def optimizer(spec: RunSpec) -> Iterator[str]:
    trainer, name = spec.trainer, spec.trainer.optimizer.kind
    takes_parts, takes_host = OPTIMIZERS[name].takes_parts, name in HOST_OPTIMIZERS
    for key, value, required_value, is_free in (
        ("lora", trainer.lora, None, takes_parts),
        ("tensor_parallel", trainer.tensor_parallel, 1, takes_parts),
        ("cpu_offload", trainer.cpu_offload, False, takes_host),
    ):
        if value != required_value and not is_free:
            yield (
                f"trainer.optimizer.kind {name!r} takes full layers on the GPU only, but "
                f"trainer.{key} is {'set' if key == 'lora' else value}; remove it, or use the optimizer "
                "'adamw'"
            )


def train_engine(spec: RunSpec) -> Iterator[str]:
    """Yields the settings of a run that its training engine does not support."""
    name, engine = spec.trainer.engine, train_engine_kind(spec.trainer.engine)
    for key, values in engine.supported.items():
        value = attrgetter(key)(spec)
        if value not in values:
            choices = " or ".join(map(in_yaml, values))
            # Of two engines, the other one may be what the run needs.
            other_engine = "stages" if key == "trainer.pipeline_parallel" else "fsdp"
            yield (
                f"trainer.engine {name!r} supports {key} {choices} only, but it is {in_yaml(value)}; "
                f"set {key} to {in_yaml(values[0])}, or trainer.engine to {other_engine!r}"
            )
    if engine.serves_own_gpus:
        return
    with suppress(TaskGroupError):  # another rule reports impossible groups
        kinds = kinds_with_own_gpus(spec.topology).items()
        if roles := [role for role, kind in kinds if kind.program == "trainer"]:
            yield (
                f"trainer.engine {name!r} computes all models in the trainer, but topology.task_groups "
                f"gives {', '.join(roles)} GPUs of their own; remove these groups, or set trainer.engine "
                "to 'fsdp'"
            )


_RULES: tuple[Callable[[RunSpec], Iterator[str]], ...] = (
    _store_urls,
    models,
    teacher,
    data,
    _rewards,
    _services,
    _rollout,
    _sandbox,
    _sampling,
    _engine,
    _formulas,
    _correction,
    _score_centering,
    _without_effect,
    _batch,
    _early_groups,
    demonstrations,
    reward_model,
    parallelism,
    optimizer,
    train_engine,
    quota,
    weight_sync,
    placement,
)
