"""Rules across the keys of a RunSpec. Each rule yields its problems; all are reported at once.

A message begins with a key and names all keys involved, their values, and a fix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from services.common.callables import is_reference
from services.common.fields import FIELDS, TOKEN_REWARDS
from services.common.runspec.built_in import EARNED, NEED_ANSWERS, REWARDS, SERVICES, WORKFLOWS
from services.common.runspec.data_rules import data, demonstrations
from services.common.runspec.engines import engine_kind
from services.common.runspec.formulas import ADVANTAGES, LOSSES, Formula
from services.common.runspec.placement_rules import placement
from services.common.runspec.rollout import RewardSpec
from services.common.runspec.run import TINY_PREFIX, RunSpec
from services.common.runspec.suggestions import did_you_mean
from services.common.runspec.train_engines import train_engine_kind
from services.common.runspec.trainer import CriticSpec, LoraSpec
from services.common.runspec.weight_modes import HANDLE, MODES, transport_of
from services.common.runspec.workers import apart


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
    algorithm = spec.algorithm
    is_compared = algorithm.kl.coefficient > 0
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
    if algorithm.advantage == "none" and not is_compared:
        yield (
            "algorithm.advantage is 'none' and algorithm.kl.coefficient 0, so nothing would be trained; set "
            "teacher, or use another advantage"
        )
    if algorithm.advantage == "none" and algorithm.kl.placement == "reward" and is_compared:
        yield (
            "algorithm.kl.placement is 'reward', but algorithm.advantage 'none' ignores rewards; remove "
            "algorithm.kl.placement, or use another advantage"
        )
    sets = spec.data.heldout_sets.values()
    is_scored = spec.rollout.rewards or all(part.rewards for part in sets)
    if algorithm.advantage == "none" and not is_scored:
        yield (
            "data.heldout is set, but rollout.rewards, which score its answers, is not; set it (with "
            "algorithm.advantage 'none' it is only measured), or remove data.heldout"
        )


_ITEM_BYTES = {"bool": 1, "int32": 4, "float32": 4}


def quota(spec: RunSpec, *, expert_bytes: int = 0) -> Iterator[str]:
    """Yields a problem if the quota is smaller than a batch of maximum length.

    A batch is trained only after all of it is stored, whatever its length.

    Args:
        spec: The run.
        expert_bytes: Bytes per token of the chosen experts, if they are stored.
    """
    given, needed = spec.transferqueue.quota_bytes, batch_bytes(spec, expert_bytes=expert_bytes)
    prompts, group_size = spec.trainer.prompts_per_step, spec.samples_per_group
    longest, token_bytes = spec.rollout.max_response_tokens, _token_bytes(spec) + expert_bytes
    if needed > given:
        yield (
            f"transferqueue.quota_bytes is {given:,}, but a batch may take {needed:,}: "
            f"trainer.prompts_per_step ({prompts}) groups of {group_size} responses of up to "
            f"rollout.max_response_tokens ({longest}), {token_bytes} bytes a token, and training starts "
            f"after all are stored; raise it, to {2 * needed} to leave room for the next batch"
        )


def batch_bytes(spec: RunSpec, *, expert_bytes: int = 0) -> int:
    """Returns the max bytes of a batch in the transferqueue, if all responses have the maximum length.

    Args:
        spec: The run.
        expert_bytes: Bytes per token of the chosen experts, if they are stored.
    """
    group_size = spec.samples_per_group
    response_bytes = spec.rollout.max_response_tokens * (_token_bytes(spec) + expert_bytes)
    prompt_bytes = spec.data.max_prompt_tokens * (4 + group_size * expert_bytes)
    return spec.trainer.prompts_per_step * (group_size * response_bytes + prompt_bytes)


def _token_bytes(spec: RunSpec) -> int:
    """Returns the bytes that a rollout stores per response token."""
    are_placed = any(one.per != "response" for some in spec.rewards.values() for one in some)
    return sum(
        _ITEM_BYTES[field.dtype]
        for field in FIELDS
        if (field.shape, field.producer) == ("[R]", "rollout")
        and (are_placed or field.name != TOKEN_REWARDS)
    )


def weight_sync(spec: RunSpec) -> Iterator[str]:
    """Yields problems of the weight transfer."""
    sync, lora = spec.weight_sync, spec.trainer.lora
    mode = MODES[sync.mode]
    if mode.through_host and sync.backend not in ("auto", HANDLE, transport_of("cpu")):
        yield (
            f"weight_sync.mode {sync.mode} transfers weights through host memory, which {sync.backend} does "
            "not support; set weight_sync.backend to auto"
        )
    if lora is not None and lora.sync == "adapter":
        yield from _alone(spec, lora)
    ahead = spec.algorithm.max_staleness + 1
    if sync.publish_every > ahead and not spec.algorithm.num_demonstrations:
        yield (
            f"weight_sync.publish_every is {sync.publish_every}, but with algorithm.max_staleness "
            f"{ahead - 1} rollouts generate for {ahead} steps under the same weights, then wait for new "
            "ones; lower the first or raise the second"
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
    for role, kind in apart(spec.topology).items():
        if kind.receives_weights and not kind.merges_adapters:
            yield (
                f"workers of the role {role} cannot merge adapters, as trainer.lora.sync adapter requires; "
                "use sync merged"
            )


def problems(spec: RunSpec) -> Iterator[str]:
    """Yields all problems across keys of a specification whose keys are valid by themselves."""
    return chain.from_iterable(rule(spec) for rule in _RULES)


def _rewards(spec: RunSpec) -> Iterator[str]:
    are_scored = all(part.rewards for part in spec.data.train_sets.values())
    needs_none = spec.algorithm.num_demonstrations or spec.algorithm.advantage == "none"
    if not (spec.rollout.rewards or are_scored or needs_none):
        yield (
            "rollout.rewards is required: expected at least 1 reward for the sampled responses, "
            "for example [{name: exact_match}]"
        )
    for key, rewards in spec.rewards.items():
        if key == "rollout.rewards":
            own = [part for part in spec.data.sets.values() if part.rewards is None]
            has_answers = all(spec.data.answer_column_of(part) is not None for part in own)
        else:
            part = spec.data.sets[key.removeprefix("data.").removesuffix(".rewards")]
            has_answers = spec.data.answer_column_of(part) is not None
        yield from _rewards_of(key, rewards, has_answers=has_answers)
        yield from _missing_scores(key, rewards, spec)
        most, size = spec.rollout.max_running_samples, spec.samples_per_group
        if size > most and (compared := [one.name for one in rewards if one.sees != "response"]):
            yield (
                f"{key}: {compared[0]!r} compares the responses of a group, but a group of {size} is split "
                f"over several rollouts; set rollout.max_running_samples ({most}) to at "
                f"least {size}"
            )


def _rewards_of(
    list_key: str, rewards: Sequence[RewardSpec], *, has_answers: bool
) -> Iterator[str]:
    known = (*REWARDS, EARNED)
    for index, reward in enumerate(rewards):
        key = f"{list_key}.{index}"
        if reward.name.startswith(SERVICES):
            yield from _address(f"{key}.name", reward.name)
        elif reward.name not in known and not is_reference(reward.name):
            yield (
                f"{key}.name: {reward.name!r} is not a known reward; use one of {', '.join(known)}, the URL "
                f"of a reward service ({', '.join(SERVICES)}), or 'module:function' or 'file.py:function'."
                + did_you_mean(reward.name, known)
            )
        if reward.name.startswith(SERVICES) and (
            unknown := sorted(reward.arguments.keys() - {"token"})
        ):
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


def _address(key: str, url: str) -> Iterator[str]:
    """Yields a problem if a service's address is incomplete."""
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and (parts.port or not url.startswith("grpc"))
    except ValueError:
        is_whole = False
    if not is_whole:
        yield (
            f"{key}: expected the URL of a reward service, http://HOST/PATH or grpc://HOST:PORT, got {url!r}"
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
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature is 0 (greedy), so all responses of a group would be equal; "
            "set it above 0"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        yield (
            "rollout.sampling.top_p must be 1 and top_k 0 for training, because the trainer's "
            f"logprobs cover all tokens, got {sampling.top_p} and {sampling.top_k}"
        )
    if "" in sampling.stop:
        yield "rollout.sampling.stop has an empty string, which would end every response; remove it"
    overlong = spec.algorithm.overlong.buffer_tokens
    if overlong > rollout.max_response_tokens:
        yield (
            f"algorithm.overlong.buffer_tokens ({overlong}) must not exceed rollout.max_response_tokens "
            f"({rollout.max_response_tokens}), the length limit at which the penalty ends; lower it"
        )


def _engine(spec: RunSpec) -> Iterator[str]:
    name, rollout = spec.rollout.engine, spec.rollout
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
    most_tokens = spec.data.max_prompt_tokens + rollout.max_response_tokens
    try:
        engine_kind(name).check(rollout.engine_arguments, most_tokens=most_tokens)
    except ValueError as error:
        yield str(error)


def _argument_problems(
    key: str, name: str, formula: Formula, arguments: Mapping[str, Any]
) -> Iterator[str]:
    known = tuple(formula.arguments.model_fields)
    try:
        formula.resolve(arguments)
    except ValidationError as error:
        for problem in error.errors():
            argument = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                settings = ", ".join((*known, *(f"algorithm.{each}" for each in formula.keys)))
                yield (
                    f"{key}_arguments.{argument} is unknown; the settings of {name!r} are "
                    f"{settings or 'none'}" + did_you_mean(argument, known)
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
    if spec.critic != CriticSpec() and not algorithm.advantage_kind.needs_critic:
        yield (
            f"critic is set, but algorithm.advantage {algorithm.advantage!r} has no critic; remove critic, "
            "or set algorithm.advantage to 'gae'"
        )
    if spec.trainer.steps is not None and spec.critic.warmup_steps >= spec.trainer.steps:
        yield (
            f"critic.warmup_steps ({spec.critic.warmup_steps}) must be below trainer.steps "
            f"({spec.trainer.steps}), or the policy would never be trained; lower the first or raise the "
            "second"
        )


def _correction(spec: RunSpec) -> Iterator[str]:
    algorithm = spec.algorithm
    is_sampled = algorithm.num_demonstrations == 0
    if algorithm.correction == "none" and algorithm.max_staleness > 0 and is_sampled:
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
    if algorithm.rejection_denominator == "kept" and not algorithm.rejection:
        yield (
            "algorithm.rejection_denominator is 'kept', but algorithm.rejection is empty; add a mask, or "
            "remove algorithm.rejection_denominator"
        )
    for index, mask in enumerate(algorithm.rejection):
        key = f"algorithm.rejection.{index}"
        if mask.lower is None and mask.upper is None:
            yield f"{key} has no bounds; set {key}.lower, {key}.upper or both, or remove it"
        elif mask.lower is not None and mask.upper is not None and mask.lower >= mask.upper:
            yield f"{key}.lower ({mask.lower:g}) must be below {key}.upper ({mask.upper:g})"


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
    group_size, least = spec.rollout.group_size, spec.algorithm.min_group_size
    if group_size < least:
        yield (
            f"rollout.group_size ({group_size}) is below algorithm.min_group_size ({least}), so no "
            "group could ever be trained; raise the first or lower the second"
        )
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


def _parallelism(spec: RunSpec) -> Iterator[str]:
    trainer, lora = spec.trainer, spec.trainer.lora
    together = trainer.tensor_parallel * trainer.context_parallel
    if trainer.world_size % together:
        also = f" times trainer.context_parallel ({trainer.context_parallel})"
        yield (
            f"trainer.world_size ({trainer.world_size}) must be a multiple of "
            f"trainer.tensor_parallel ({trainer.tensor_parallel})"
            + (also if trainer.context_parallel > 1 else "")
        )
    data_parallel = trainer.world_size // trainer.tensor_parallel
    if data_parallel % trainer.expert_parallel:
        yield (
            f"trainer.expert_parallel is {trainer.expert_parallel}, which does not divide the "
            f"{data_parallel} data-parallel processes (trainer.world_size / trainer.tensor_parallel); "
            "set it to a divisor"
        )
    if trainer.zero_stage == 1 and trainer.offloads_weights:
        yield (
            "trainer.zero_stage 1 keeps whole weights on the GPU, but trainer.cpu_offload true moves them to "
            "the host; set trainer.zero_stage to 3 or trainer.cpu_offload to false or optimizer"
        )
    if lora is not None and trainer.tensor_parallel > 1:
        yield (
            f"trainer.lora cannot be combined with trainer.tensor_parallel {trainer.tensor_parallel}; "
            "set trainer.tensor_parallel to 1 and shard over more data-parallel ranks"
        )
    if lora is not None and not lora.target_modules:
        yield "trainer.lora.target_modules is empty, so nothing would be trained; add modules such as q_proj"


def _train_engine(spec: RunSpec) -> Iterator[str]:
    yield from train_engine_kind(spec.trainer.engine).problems(spec)


_RULES: tuple[Callable[[RunSpec], Iterator[str]], ...] = (
    models,
    teacher,
    data,
    _rewards,
    _rollout,
    _engine,
    _formulas,
    _correction,
    _batch,
    _early_groups,
    demonstrations,
    _parallelism,
    _train_engine,
    quota,
    weight_sync,
    placement,
)
