"""Checks before a run starts, of everything that would make it fail.

The services make the same checks. Here all checks are made at once, and all problems are reported
together.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from services.cli.machine import (
    go_offline_unless_reachable,
    hub_is_needed,
    machine_defaults,
    memory_problems,
    unmet_requirements,
)
from services.cli.model_problems import (
    adapter_problems,
    batch_problems,
    engine_problems,
    length_problems,
    mixture_problems,
    quantization_problems,
    quota_problems,
    token_problems,
)
from services.cli.row_trial import MAX_ROWS, RowTrialResult, try_functions, try_rows
from services.cli.settings import MachineSettings
from services.common.callables import bind_callable, load_callable
from services.common.models.configs import full_config, read_config
from services.common.models.families import check_trainer
from services.common.models.made_tokenizers import Vocabulary, builtin_vocabulary, tokenizer_name
from services.common.models.weight_files import file_problems
from services.common.runspec.built_in import AGENTS, EARNED, REWARDS, WORKFLOWS
from services.common.runspec.data import kind_of
from services.common.runspec.formulas import ADVANTAGES, LOSSES
from services.common.runspec.loader import Draft, SpecError, read_draft
from services.common.runspec.run import ModelSpec, RunSpec
from services.common.runspec.suggestions import did_you_mean
from services.common.runspec.trainer import OF_EXPERTS
from services.common.security.secrets import find_plain_secrets
from services.rollout.data.prompts import check_prompt
from services.rollout.data.sources import PromptSource, open_source
from services.rollout.workflows.base import load_workflow
from services.trainer.checkpoint import manifest

_OFFLINE = (
    "Hugging Face does not respond within 2 s, and this machine's cache lacks files that the run needs: "
    "check the network, or use local folders and files in model.path, model.tokenizer and data"
)


def read_checked(path: Path, overrides: Sequence[str] = (), *, is_here: bool = True) -> Draft:
    """Reads a specification file and checks it and all resources that it names.

    Args:
        path: A YAML or JSON file.
        overrides: Assignments of keys.
        is_here: If true, the run will be on this machine, which must have all resources that it
            needs and names.

    Raises:
        SpecError: With one line per problem.
    """
    draft = read_draft(path, overrides)
    spec = draft.examined.spec
    if is_here and spec is not None and (better := [*machine_defaults(spec, draft.left_out)]):
        # Read the file again, because other defaults follow from these values.
        draft = read_draft(path, [*overrides, *(f"{each.key}={each.value}" for each in better)])
        draft = replace(draft, notes=(*draft.notes, *(each.why for each in better)))
    examined = draft.examined
    problems = list(examined.problems)
    if examined.spec is not None:
        problems += find_plain_secrets(examined.spec)
    if examined.spec is not None and is_here:
        found = _examined_here(examined.spec, tries_functions=not problems)
        problems += [each for each in found.problems if not examined.is_about_stand_ins(each)]
        draft = replace(draft, notes=(*draft.notes, *found.notes))
    if problems:
        raise SpecError(tuple(dict.fromkeys(problems)))
    return draft


def check(spec: RunSpec) -> None:
    """Checks all resources that a specification names.

    Raises:
        SpecError: With one line per problem.
    """
    if problems := _examined_here(spec).problems:
        raise SpecError(problems)


def model_config(spec: RunSpec) -> Any:
    """Returns the model's configuration, from Hugging Face if the model is there."""
    from services.common.models.loading import load_config
    from services.common.models.tokenizer import load_tokenizer

    if hub_is_needed(spec):
        go_offline_unless_reachable()
    return load_config(spec.model, load_tokenizer(spec.model))


def _examined_here(spec: RunSpec, *, tries_functions: bool = True) -> RowTrialResult:
    problems: list[str] = []
    is_offline = hub_is_needed(spec) and not go_offline_unless_reachable()
    sources: dict[str, PromptSource] = {}
    _collect(problems, _model, spec)
    is_tokenizer_right = not problems
    for step in (
        _teacher,
        _start,
        partial(_sources, opened=sources),
        _rewards,
        _workflow,
        _formulas,
        _curriculum,
        unmet_requirements,
    ):
        _collect(problems, step, spec)
    if not problems:
        _collect(problems, _built, spec)
    notes: list[str] = []
    if is_tokenizer_right:
        notes = _try(problems, spec, sources, tries_functions=tries_functions)
    if problems and is_offline:
        problems.append(_OFFLINE)
    return RowTrialResult(problems, notes)


def _try(
    problems: list[str],
    spec: RunSpec,
    sources: Mapping[str, PromptSource],
    *,
    tries_functions: bool,
) -> list[str]:
    """Tries the first rows, and the user's functions if there is no other problem; returns notes."""
    # This imports transformers, which takes a second.
    from services.common.models.tokenizer import load_chat_tokenizer

    tokenizer = load_chat_tokenizer(spec)
    rows, prompts = try_rows(spec, sources, tokenizer)
    problems += rows.problems
    if problems or not tries_functions:
        return rows.notes
    functions = try_functions(spec, prompts, tokenizer)
    problems += functions.problems
    return [*rows.notes, *functions.notes]


def _collect(problems: list[str], step: Callable[[RunSpec], Iterator[str]], spec: RunSpec) -> None:
    try:
        problems.extend(step(spec))
    except (ValueError, OSError) as error:
        problems.append(str(error))


def _weights(key: str, model: ModelSpec) -> Iterator[str]:
    """Yields problems that prevent a model from being loaded."""
    path = model.path
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise ValueError(
            f"{key}.path: folder {path!r} does not exist; use a folder with a model, a Hugging Face id such "
            "as 'Qwen/Qwen2.5-0.5B', or a preset such as 'tiny:qwen2-0.4m'"
        )
    if Path(path).is_dir() and not any(Path(path).glob("*.safetensors")):
        yield (
            f"{key}.path {path!r} has no weights; use a folder with config.json and *.safetensors files"
        )
    elif Path(path).is_dir():
        for problem in file_problems(Path(path)):
            yield f"{key}.path: {problem}"
    if model.warm_start is not None:
        examples = model.warm_start.examples
        yield from _called(f"{key}.warm_start.examples", examples, (0, 0), {})


def _teacher(spec: RunSpec) -> Iterator[str]:
    if spec.teacher is None:
        return
    yield from _weights("teacher", spec.teacher)
    config = read_config(spec.teacher, _vocabulary(spec.of_reference))
    for problem in check_trainer(
        config,
        tensor_parallel=spec.trainer.tensor_parallel,
        context_parallel=spec.trainer.context_parallel,
    ):
        yield problem.replace("model.path", "teacher.path")
    # This imports transformers, which takes a second.
    from services.common.models.teachers import check_teacher

    check_teacher(spec)


def _model(spec: RunSpec) -> Iterator[str]:
    yield from _weights("model", spec.model)
    tokenizer = None
    try:
        tokenizer = _vocabulary(spec)
    except (ValueError, OSError) as error:
        yield str(error)
        if spec.model.is_tiny:
            return
    config = read_config(spec.model, tokenizer)
    problems = check_trainer(
        config,
        tensor_parallel=spec.trainer.tensor_parallel,
        expert_parallel=spec.trainer.expert_parallel,
        context_parallel=spec.trainer.context_parallel,
    )
    is_full = spec.model.is_tiny
    if not is_full:
        try:
            # Add values that the file leaves to the defaults of its family.
            config, is_full = {**config, **full_config(spec.model).to_dict()}, True
        except ValueError as error:
            problems = problems or [str(error)]
    yield from problems
    yield from quantization_problems(config)
    yield from adapter_problems(spec, config)
    yield from mixture_problems(spec, config)
    yield from engine_problems(spec, config)
    yield from length_problems(spec, config)
    if is_full:
        yield from quota_problems(spec, config)
        machine = MachineSettings()
        capacity = machine.queue_bytes + machine.queue_spill_bytes
        yield from batch_problems(spec, config, capacity_bytes=capacity)
    if tokenizer is not None:
        yield from token_problems(spec, config, tokenizer)


def _built(spec: RunSpec) -> Iterator[str]:
    """Yields problems of a model's modules and their sizes; called if there is no other problem."""
    if spec.trainer.lora is None and spec.model.is_tiny:
        return  # it loads torch
    try:
        if spec.trainer.lora is not None:
            yield from _adapter_names(spec)
        if not spec.model.is_tiny:
            yield from memory_problems(spec, full_config(spec.model))
    except Exception as error:  # noqa: BLE001 -- a family's own code builds the model of a user's numbers
        yield (
            f"model.path {spec.model.path!r}: building a model from its config.json failed "
            f"({type(error).__name__}: {error}); correct it, or use another model"
        )


def _adapter_names(spec: RunSpec) -> Iterator[str]:
    """Yields LoRA target modules that the model does not have."""
    # This imports torch.
    from services.common.models.training_memory import shapes_of

    assert spec.trainer.lora is not None
    shapes = shapes_of(model_config(spec))
    modules = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    known = sorted({name.rpartition(".")[2] for name in modules} - {"embed_tokens"})
    for target in spec.trainer.lora.target_modules:
        if OF_EXPERTS in target:
            continue  # reported with the family
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            yield (
                f"trainer.lora.target_modules has {target!r}, but the linear modules of model.path are "
                f"{', '.join(known)}; use some of these.{did_you_mean(target, known)}"
            )


def _vocabulary(spec: RunSpec) -> Vocabulary:
    made = builtin_vocabulary(tokenizer_name(spec.model))
    if made is not None:
        return made
    # This imports transformers, which takes a second.
    from services.common.models.tokenizer import load_chat_tokenizer

    return load_chat_tokenizer(spec)


def _start(spec: RunSpec) -> Iterator[str]:
    checkpoint = spec.trainer.checkpoint
    if checkpoint.start_from is not None:
        try:
            step = manifest.step_of(Path(checkpoint.start_from))
        except ValueError as error:
            yield f"trainer.checkpoint.start_from: {error}"
        else:
            if spec.trainer.steps is not None and step >= spec.trainer.steps:
                yield (
                    f"trainer.steps is {spec.trainer.steps}, but trainer.checkpoint.start_from was saved at "
                    f"step {step}, so nothing would be trained; raise trainer.steps"
                )
    if checkpoint.directory is not None and Path(checkpoint.directory).is_file():
        yield (
            f"trainer.checkpoint.directory: {checkpoint.directory!r} is a file; use a folder, or remove the "
            "key"
        )


def _sources(spec: RunSpec, *, opened: dict[str, PromptSource]) -> Iterator[str]:
    """Yields problems of the data; sources with usable rows are added to ``opened``."""
    for split, source_spec in spec.data.sets.items():
        if source_spec.source == "environment" and source_spec.limit is None:
            continue  # the rules say so
        rewards = source_spec.rewards or spec.rollout.rewards
        count = spec.algorithm.num_demonstrations
        if kind_of(split) == "heldout" and rewards:
            count = min(count, 1)
        try:
            source = open_source(source_spec, spec.data, key=f"data.{split}")
            if source_spec.source != "environment":
                _check_rows(source, spec, split, num_demonstrations=count)
            opened[split] = source
        except (ValueError, OSError) as error:
            yield from str(error).split("\n")
            continue
        metadata = source[0].get("metadata")
        if any(reward.name == "reasoning_gym" for reward in rewards) and (
            not isinstance(metadata, dict) or "source_dataset" not in metadata
        ):
            yield (
                f"rollout.rewards: reasoning_gym needs rows with metadata.source_dataset, but rows of "
                f"data.{split} lack it; set data.{split}.source to reasoning_gym, or use another reward"
            )
    yield from _too_few_rows(spec, opened)


def _too_few_rows(spec: RunSpec, opened: Mapping[str, PromptSource]) -> Iterator[str]:
    """Yields a problem if a step has more prompts than rows, because it would train some rows repeatedly."""
    sets, prompts = spec.data.train_sets, spec.trainer.prompts_per_step
    if spec.validation.only or not sets.keys() <= opened.keys():
        return
    num_rows = sum(len(opened[split]) for split in sets)
    if num_rows < prompts:
        yield (
            f"trainer.prompts_per_step is {prompts}, but data.train has {num_rows} rows, so a step would "
            "train some rows several times; lower it, or add rows"
        )


def _check_rows(
    source: PromptSource, spec: RunSpec, split: str, *, num_demonstrations: int
) -> None:
    """Checks rows until one is usable; the run quarantines and reports the others."""
    refused = []
    for index in range(min(len(source), MAX_ROWS)):
        try:
            check_prompt(
                source[index],
                spec.data,
                spec.data.sets[split],
                key=f"data.{split}",
                num_demonstrations=num_demonstrations,
            )
        except ValueError as error:
            refused.append(error)
        else:
            return
    raise refused[0]


def _rewards(spec: RunSpec) -> Iterator[str]:
    named = (
        (f"{key}.{index}", reward)
        for key, rewards in spec.rewards.items()
        for index, reward in enumerate(rewards)
    )
    for key, reward in named:
        if reward.name == EARNED or "://" in reward.name:
            continue
        reference = REWARDS.get(reward.name, reward.name)
        if reward.name in REWARDS and not reward.arguments:
            continue  # what it imports takes seconds
        seen = "episode" if reward.sees == "response" else "episodes"
        given = dict(reward.arguments) | ({seen: {}} if reward.sees_episode else {})
        responses = ("", "") if reward.sees == "pairs" else ("",)
        yield from _called(f"{key}.name", reference, ("", *responses, None, {}), given)


def _workflow(spec: RunSpec) -> Iterator[str]:
    rollout, arguments = spec.rollout, spec.rollout.workflow_arguments
    if rollout.workflow not in WORKFLOWS and ":" not in rollout.workflow:
        return  # the rules say so
    try:
        load_workflow(rollout)
    except (ValueError, ImportError) as error:
        text = str(error)
        yield text if text.startswith("rollout.workflow") else f"rollout.workflow: {text}"
    named = []
    for workflow in ("agent", "environment"):
        reference = str(arguments.get(workflow, ""))  # without one it cannot be made
        if (
            rollout.workflow == workflow
            and reference
            and "://" not in reference
            and reference not in AGENTS
        ):
            named = [(f"rollout.workflow_arguments.{workflow}", reference)]
    chooses = str(arguments.get("train", ""))
    if rollout.workflow == "agent" and ":" in chooses:
        yield from _called("rollout.workflow_arguments.train", chooses, ([], {}), {})
    if rollout.workflow == "multi_turn":
        tools = arguments.get("tools", ())
        named = [("rollout.workflow_arguments.tools", str(tool)) for tool in tools]
    for key, reference in named:
        yield from _called(key, reference, None, {})


def _formulas(spec: RunSpec) -> Iterator[str]:
    algorithm = spec.algorithm
    # Built-in functions are skipped because they import torch, which takes seconds.
    for key, name, known, arguments in (
        ("algorithm.loss", algorithm.loss, LOSSES, algorithm.loss_arguments),
        ("algorithm.advantage", algorithm.advantage, ADVANTAGES, algorithm.advantage_arguments),
    ):
        if name not in known and ":" in name:
            try:
                bind_callable(name, arguments, key=key)
            except ValueError as error:
                yield str(error)


def _curriculum(spec: RunSpec) -> Iterator[str]:
    curriculum = spec.data.curriculum
    if curriculum is not None and curriculum.function is not None:
        key, arguments = "data.curriculum.function", curriculum.arguments
        yield from _called(key, curriculum.function, ({}, {}), arguments)


def _called(
    key: str, reference: str, given: tuple[Any, ...] | None, arguments: dict[str, Any]
) -> Iterator[str]:
    """Yields problems that prevent a function from being imported or called with these arguments."""
    try:
        function = load_callable(reference)
    except (ValueError, ImportError, SyntaxError) as error:
        yield f"{key}: {error}"
        return
    if given is None:
        return
    try:
        inspect.signature(function).bind(*given, **arguments)
    except TypeError as error:
        yield (
            f"{key}: {reference!r} cannot be called with {len(given)} arguments"
            + (f" and {', '.join(sorted(arguments))}" if arguments else "")
            + f" ({error}); change the function, or its arguments in the specification"
        )
    except ValueError:
        return  # a built-in one, which has no signature
