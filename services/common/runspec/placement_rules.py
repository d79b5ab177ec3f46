"""Rules on the assignment of a run's GPUs to its tasks."""

from collections.abc import Iterator

from services.common.runspec.engines import ENGINES
from services.common.runspec.run import RunSpec
from services.common.runspec.weight_modes import MODES
from services.common.runspec.workers import WORKERS, apart, scoring_ranks


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
    if topology.scoring_ranks > 1 and not (
        any(kind.ranks is scoring_ranks for kind in apart(topology).values())
    ):
        yield _NOBODY_SHARDED.format(topology.scoring_ranks)
    yield from _counts(spec, engine_gpus)
    for kind in apart(topology).values():
        yield from kind.problems(spec)
    yield from _neighbours(spec)


_NOBODY_SHARDED = (
    "topology.scoring_ranks is {}, but no task that only scores (logp, ref_logp) has its own GPUs; add "
    "a group for one of them to topology.task_groups, or remove topology.scoring_ranks"
)


def _counts(spec: RunSpec, engine_gpus: int) -> Iterator[str]:
    """Yields problems of process counts that differ from those of the task groups."""
    kinds = [kind for kind in WORKERS.values() if kind.is_required]
    kinds += apart(spec.topology).values()
    try:
        spec.topology.place({kind.task: kind.unit(spec) for kind in kinds})
    except ValueError as error:
        yield f"topology.ratios: {error}"
        return
    given = {
        "trainer.world_size": (spec.trainer.world_size, spec.topology.gpus_of("train")),
        "rollout.replicas": (
            spec.rollout.replicas,
            spec.topology.gpus_of("generate") // engine_gpus,
        ),
    }
    for key, (stated, follows) in given.items():
        if stated != follows:
            yield (
                f"{key} is {stated}, but topology implies {follows}; remove the key, or change "
                "topology.ratios"
            )


def _neighbours(spec: RunSpec) -> Iterator[str]:
    """Yields problems of tasks that share GPUs with others, or have a group without their workers."""
    for group in spec.topology.place().groups:
        for kind in WORKERS.values():
            others = [task for task in group.tasks if task not in kind.tasks]
            is_inside = "train" in group.tasks and not kind.is_required
            if kind.is_alone and kind.task in group.tasks and others and not is_inside:
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
    for key, (found, fitting, why) in {
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
        if found != fitting:
            yield f"{key} is {found!r}, and {why}; set it to {fitting!r}"
