"""Checks before a run starts, of everything that would make it fail.

The services make the same checks. Here all checks are made at once, and all problems are reported together.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, Final, cast

from services.checks.start.hub import go_offline_unless_reachable, hub_is_needed, model_config
from services.checks.start.machine import (
    MachineSettings,
    machine_defaults,
    memory_problems,
    unmet_requirements,
)
from services.checks.start.rows import MAX_ROWS, RowTrialResult, try_functions, try_rows
from services.common.callables import (
    USER_CODE_BEGINS,
    announced,
    bind_callable,
    call_problems,
    load_callable,
)
from services.common.callables import logger as user_code_logger
from services.common.errors import ServiceError
from services.common.local_copies import with_local_copies
from services.common.models.configs import (
    begin_check,
    full_config,
    is_folder,
    missing_folder,
    read_config,
)
from services.common.models.families import (
    FAMILIES,
    Family,
    check_trainer,
    exact_tokens,
    is_mixture,
    routing_shape,
)
from services.common.models.made_tokenizers import (
    Vocabulary,
    builtin_vocabulary,
    is_builtin_tokenizer,
    tokenizer_name,
)
from services.common.models.tokenizer import Tokenizer
from services.common.models.weight_files import file_problems
from services.common.models.weight_formats import FORMATS, other_problems
from services.common.parent import die_with_parent, disconnect_forks
from services.common.runspec.base import did_you_mean
from services.common.runspec.data import kind_of
from services.common.runspec.engines import engine_kind, untrainable
from services.common.runspec.examining import argument_problems
from services.common.runspec.formulas import ADVANTAGES, LOSSES
from services.common.runspec.loader import Draft, SpecError, read_draft
from services.common.runspec.rollout import REWARDS, WORKFLOWS
from services.common.runspec.rules import batch_bytes, critic_warmup, quota
from services.common.runspec.run import ModelSpec, RunSpec
from services.common.runspec.trainer import OF_EXPERTS, LoraSpec
from services.common.runspec.weight_modes import MODES, TRANSPORTS
from services.common.security.secrets import find_plain_secrets
from services.common.stores import OBJECT_CACHE, fetch, is_url, join_url, open_checkpoints
from services.rollout.data.prompts import check_prompt
from services.rollout.data.sources import PromptSource, open_source
from services.rollout.engines.base import split_stop_texts, unspelled_stop_texts
from services.rollout.workflows.base import CodeWorkflow, TokenizerWorkflow, load_workflow
from services.rollout.workflows.chat_turns import kept_marks, plain_role_marks
from services.trainer.checkpoint import compatibility, manifest

_AXES: Final = ("expert_parallel", "tensor_parallel", "context_parallel")
_SHOWN = 300
"""Max characters of an error of the operating system in a message."""


def quantization_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem if the weights have 4 or 8 bits, which training and weight transfer do not support."""
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        yield (
            f"model.path has quantized weights (quantization_config in its config.json is {method!r}); use a "
            "copy in bfloat16"
        )


def precision_problems(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem if the model's states can exceed the range of float16."""
    kind = str(config.get("model_type"))
    if spec.trainer.dtype == "float16" and FAMILIES.get(kind, Family()).exceeds_float16:
        yield (
            f"trainer.dtype is float16, but states of models of the type {kind!r} can exceed its range; set "
            "trainer.dtype to bfloat16"
        )


def adapter_problems(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem if adapters of experts are wanted, but the model has none."""
    if spec.trainer.lora is None or config.get("model_type") not in FAMILIES:
        return
    if spec.trainer.lora.adapts_experts and FAMILIES[config["model_type"]].routing is None:
        configured_modules = spec.trainer.lora.target_modules or ()
        yield (
            f"trainer.lora.target_modules has experts, but {config['model_type']!r} has none; remove "
            f"{', '.join(name for name in configured_modules if OF_EXPERTS in name)}"
        )


def engine_problems(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem if the GPUs of an engine cannot share the attention heads equally."""
    name = engine_kind(spec.rollout.engine).heads_argument
    size = spec.rollout.engine_arguments.get(name, 1) if name is not None else 1
    text = config.get("text_config") or config
    heads = text.get("num_attention_heads", size)
    shared = text.get("num_key_value_heads") or heads
    if heads % size or (shared % size and size % shared):
        yield (
            f"rollout.engine_arguments.{name} is {size}, but model.path has {heads} attention heads and "
            f"{shared} key-value heads, which cannot be split evenly over so many GPUs; set it to a divisor "
            "of both"
        )


def transfer_problems(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem if weights are to be written into an engine that computes other tensors from them."""
    kind, engine = str(config.get("model_type")), spec.rollout.engine
    if engine_kind(engine).package is None or not FAMILIES.get(kind, Family()).needs_loader:
        return
    why = f"but {engine} computes other tensors from the weights of {kind!r} and must load them"
    if MODES[spec.weight_sync.mode].is_in_place:
        yield f"weight_sync.mode is {spec.weight_sync.mode!r}, {why}; set it to 'shadow'"
    if spec.sends_adapters and spec.trainer.lora is not None:
        yield (
            f"trainer.lora.sync is {spec.trainer.lora.sync!r}, which merges adapters into live weights, "
            f"{why}; set it to 'merged'"
        )


def mixture_problems(spec: RunSpec, config: Mapping[str, Any]) -> list[str]:
    """Returns problems of settings for experts that the model does not have."""
    family = FAMILIES.get(str(config.get("model_type")))
    routing = None if family is None else family.routing
    balancing, problems = spec.trainer.balancing, []
    wanted_values = {
        "rollout.routing_replay": (spec.rollout.routing_replay, "off"),
        "trainer.balancing.kind": (balancing.kind, "none"),
    }
    problems += [
        f"{key} is {value!r}, but model.path has model_type {config.get('model_type')!r} without experts; "
        f"set it to {off!r}"
        for key, (value, off) in wanted_values.items()
        if value != off and routing is None
    ]
    lora = spec.trainer.lora
    if lora is not None and lora.base_dtype is not None and routing is not None:
        problems.append(
            f"trainer.lora.base_dtype is {lora.base_dtype!r}, but most weights of model.path "
            f"({config.get('model_type')}) are fused experts, which are not quantized; remove the key"
        )
    if balancing.kind == "bias" and routing not in (None, "sigmoid"):
        problems.append(
            "trainer.balancing.kind is 'bias', but the routers of model.path have no "
            "e_score_correction_bias; set it to 'loss'"
        )
    has_coefficient = balancing.coefficient or config.get("router_aux_loss_coef")
    if balancing.kind == "loss" and routing is not None and not has_coefficient:
        problems.append(
            "trainer.balancing.kind is 'loss', but model.path has no router_aux_loss_coef; set "
            "trainer.balancing.coefficient"
        )
    return problems


def quota_problems(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem if samples with routed experts, which are many times larger, exceed the quota."""
    if expert_bytes := _expert_bytes(spec, config):
        yield from quota(spec, expert_bytes=expert_bytes)


def batch_problems(
    spec: RunSpec, config: Mapping[str, Any], *, capacity_bytes: int
) -> Iterator[str]:
    """Yields a problem if the transferqueue of this machine can never hold a batch."""
    batch_size = batch_bytes(spec, expert_bytes=_expert_bytes(spec, config))
    if capacity_bytes < batch_size <= spec.transferqueue.quota_bytes:
        yield (
            f"trainer.prompts_per_step is {spec.trainer.prompts_per_step}: with rollout.group_size "
            f"({spec.rollout.group_size}) and rollout.max_response_tokens "
            f"({spec.rollout.max_response_tokens}) a batch may take {batch_size:,} bytes, but the "
            f"transferqueue of this machine has {capacity_bytes:,}; lower one of them, or raise "
            "SLIPSTREAM_TRANSFERQUEUE_CAPACITY_BYTES"
        )


def record_note(spec: RunSpec) -> str:
    """Returns a note with the max size of the files that ``record: full`` writes; empty if it is off."""
    if spec.record == "off":
        return ""
    expert_bytes = 0
    if spec.rollout.routing_replay != "off":
        expert_bytes = _expert_bytes(spec, read_config(spec.model, _vocabulary(spec)))
    other_prompt_bytes = 4 * (spec.samples_per_group - 1) * spec.data.max_prompt_tokens
    # The record stores a prompt for each member of a group; the transferqueue stores it once per group.
    size = (
        batch_bytes(spec, expert_bytes=expert_bytes)
        + spec.trainer.prompts_per_step * other_prompt_bytes
    )
    steps = spec.trainer.steps
    of_steps = "" if steps is None else f", {size * steps / 1e9:.3g} GB in {steps} steps"
    return f"record: full writes at most {size / 1e6:.3g} MB per step{of_steps}, beside the checkpoints"


def _expert_bytes(spec: RunSpec, config: Mapping[str, Any]) -> int:
    """Returns the bytes per token of the chosen experts, if the run stores them."""
    routing = routing_shape(config)
    if routing is None or spec.rollout.routing_replay == "off":
        return 0
    layers, num_chosen = routing.tail
    return int(layers * num_chosen * (1 if routing.dtype == "uint8" else 2))


def token_problems(
    spec: RunSpec, config: Mapping[str, Any], tokenizer: Vocabulary
) -> Iterator[str]:
    """Yields problems of tokens that the model or tokenizer lacks, and of chats that cannot be rendered."""
    vocab_size = config.get("vocab_size")
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        yield (
            f"model.tokenizer has {tokenizer.vocab_size} tokens, but vocab_size of model.path is "
            f"{vocab_size}; use the model's own tokenizer"
        )
    num_tokens = max(vocab_size or 0, tokenizer.vocab_size)
    if unknown := [id_ for id_ in spec.rollout.sampling.stop_token_ids if id_ >= num_tokens]:
        yield (
            f"rollout.sampling.stop_token_ids has {', '.join(map(str, unknown))}, but model.path has "
            f"{num_tokens} tokens; use ids from 0 to {num_tokens - 1}"
        )
    if all(spec.rollout.sampling.stop):  # the rules report an empty text
        yield from _stop_text_problems(spec)
    if spec.data.chat_template and not tokenizer.has_chat_template:
        yield (
            "data.chat_template is true, but the tokenizer has no chat template; set it to false, or use the "
            "tokenizer of a chat model"
        )
    elif spec.data.chat_template and isinstance(tokenizer, Tokenizer):
        try:
            tokenizer.render_chat([{"role": "user", "content": "Hello"}])
        except (TypeError, ValueError) as error:
            yield f"data.chat_template is true, but rendering a chat failed: {error}"
            return
    if spec.rollout.workflow == "multi_turn":
        yield from _tool_result_problems(spec, tokenizer)


def _stop_text_problems(spec: RunSpec) -> Iterator[str]:
    """Yields problems of stop texts that can never end a response."""
    if not spec.rollout.sampling.stop:
        return
    # This imports transformers, which takes a second.
    from services.common.models.tokenizer import load_chat_tokenizer

    tokenizer, texts = load_chat_tokenizer(spec), spec.rollout.sampling.stop
    try:
        plain_texts, _ = split_stop_texts(texts, tokenizer)
    except ValueError as error:
        yield f"rollout.sampling.stop: {error}"
        return
    if unspelled := unspelled_stop_texts(plain_texts, tokenizer):
        yield (
            f"rollout.sampling.stop has {unspelled[0]!r}, but no tokens of model.tokenizer spell it, so it "
            "would never end a response; remove it, or use text that the model can write"
        )


def _tool_result_problems(spec: RunSpec, tokenizer: Vocabulary) -> Iterator[str]:
    """Yields problems of tool results that the chat template cannot render.

    The template of a built-in tokenizer renders every role.
    """
    if spec.data.chat_template and not isinstance(tokenizer, Tokenizer):
        return
    try:
        workflow = load_workflow(spec.rollout)
    except (ValueError, ImportError):  # reported where workflows are judged
        return
    try:
        if isinstance(workflow, TokenizerWorkflow):
            is_rendered = spec.data.chat_template and isinstance(tokenizer, Tokenizer)
            workflow.check_tokenizer(cast("Tokenizer", tokenizer) if is_rendered else None)
    except (TypeError, ValueError) as error:
        yield str(error)


def length_problems(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem if a prompt or a response alone can fill the model's context.

    Their sum may exceed it: a response gets the tokens that its prompt leaves. The sum is checked
    only against the length up to which an engine without sliding windows is exact.
    """
    context = config.get("max_position_embeddings")
    prompt, response = spec.data.max_prompt_tokens, spec.rollout.max_response_tokens
    for key, tokens in (
        ("data.max_prompt_tokens", prompt),
        ("rollout.max_response_tokens", response),
    ):
        if context is not None and tokens >= context:
            yield (
                f"{key} is {tokens}, but model.path has a context of {context} tokens "
                "(max_position_embeddings) for a prompt and its response; lower it"
            )
    exact = exact_tokens(config, spec.rollout.engine)
    if exact is not None and prompt + response > exact:
        yield (
            f"data.max_prompt_tokens and rollout.max_response_tokens add up to {prompt + response} tokens, "
            f"but rollout.engine {spec.rollout.engine!r} does not compute the sliding windows of "
            f"{config['model_type']!r}, so its logprobs are correct up to {exact} tokens only; lower them, "
            "or use another engine"
        )


_OFFLINE = (
    "Hugging Face does not respond within 2 s, and this machine's cache lacks files that the run needs: "
    "check the network, or use local folders and files in model.path, model.tokenizer and data"
)


def read_checked(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    is_here: bool = True,
    has_workers: bool = True,
    capturing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Draft:
    """Reads a specification file and checks it and all resources that it names.

    Args:
        is_here: If true, the run will be on this machine, which must have all resources that it
            needs and names.
        has_workers: If false, the run's workers are on other machines that share the files and packages of
            this one.
        capturing: Opens a block that takes what the user's functions write while they are tried.

    Raises:
        SpecError: With one line per problem.
    """
    draft = read_draft(path, overrides)
    spec = draft.examined.spec
    better = (
        [*machine_defaults(spec, draft.left_out, has_workers=has_workers)]
        if is_here and spec is not None
        else []
    )
    if better:
        # Read the file again, because other defaults follow from these values.
        draft = read_draft(
            path, [*overrides, *(f"{default.key}={default.value}" for default in better)]
        )
        draft = replace(draft, notes=(*draft.notes, *(default.why for default in better)))
    examined = draft.examined
    problems = list(examined.problems)
    if examined.spec is not None:
        problems += find_plain_secrets(examined.spec)
    if examined.spec is not None and is_here:
        with capturing():
            examination = _examined_apart(
                examined.spec, tries_functions=not problems, has_workers=has_workers
            )
        problems += [
            problem for problem in examination.problems if not examined.is_about_stand_ins(problem)
        ]
        draft = replace(draft, notes=(*draft.notes, *examination.notes))
    if problems:
        raise SpecError(tuple(dict.fromkeys(problems)))
    return draft


class _Activities(logging.Handler):
    """Sends the messages about user code, and the parts of the specification, to another process."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        self._connection.send((record.getMessage(), vars(record)["reference"]))


def _examined_apart(spec: RunSpec, **options: bool) -> RowTrialResult:
    """Examines a specification in a separate process, which the user's code may end."""
    if sys.platform != "linux":
        return examined_here(spec, **options)
    if hub_is_needed(spec) and not is_url(spec.model.path):
        go_offline_unless_reachable()  # for later checks of this process too
    context, activities = get_context("fork"), list[str]()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(sender, spec, options))
    process.start()
    sender.close()
    try:
        # Without a deadline: downloads and functions that make data take as long as they need, and the
        # user sees how long the command has been checking.
        while isinstance(message := receiver.recv(), tuple):
            change = activities.append if message[0] == USER_CODE_BEGINS else activities.remove
            change(message[1])
    except EOFError:
        process.join()
        return RowTrialResult([_why_ended(process.exitcode or 0, activities)])
    finally:
        process.kill()
        process.join()
    if isinstance(message, BaseException):
        raise message
    return cast("RowTrialResult", message)


def _why_ended(exit_code: int, activities: Sequence[str]) -> str:
    """Returns a problem: a process ended that examined a specification, its part ``activities[0]`` first."""
    status = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    key, *references = activities or ("the specification",)
    if not references:
        return f"{key}: the process that checked it ended with {status}"
    fix = "correct the function and its module, which must neither exit nor crash"
    return f"{key}: {references[-1]!r} ended the process that ran it, with {status}; {fix}"


def _examine(connection: Connection, spec: RunSpec, options: Mapping[str, bool]) -> None:
    die_with_parent()
    disconnect_forks(connection.fileno())
    user_code_logger.addHandler(_Activities(connection))
    user_code_logger.setLevel(logging.INFO)
    user_code_logger.propagate = False
    try:
        connection.send(examined_here(spec, **options))
    except KeyboardInterrupt:
        return  # the command that waits is interrupted too
    except Exception as error:  # noqa: BLE001 -- raised again by the process that waits
        connection.send(ExceptionWithTraceback(error, error.__traceback__))


def examined_here(
    spec: RunSpec, *, tries_functions: bool = True, has_workers: bool = True
) -> RowTrialResult:
    """Examines a specification in this process, which the user's code may end."""
    problems: list[str] = []
    try:
        spec = with_local_copies(spec, has_weights=False)
    except ValueError as error:
        return RowTrialResult([str(error)], [])
    begin_check(spec.model)
    is_offline = hub_is_needed(spec) and not go_offline_unless_reachable()
    sources: dict[str, PromptSource] = {}
    _collect(problems, _model, spec, "model")
    is_tokenizer_right = not problems
    steps: dict[str, Callable[[RunSpec], Iterator[str]]] = {
        "teacher": _teacher,
        "trainer.checkpoint": _start,
        "data": partial(_sources, opened=sources),
        "rollout.rewards": _rewards,
        "rollout.workflow": _workflow,
        "algorithm": _formulas,
        "data.curriculum": _curriculum,
        "this machine": partial(unmet_requirements, has_workers=has_workers),
    }
    for key, step in steps.items():
        _collect(problems, step, spec, key)
    if not problems:
        _collect(problems, partial(_built, has_workers=has_workers), spec, "model")
    notes: list[str] = []
    if is_tokenizer_right:
        with announced("data"):
            notes = _try(problems, spec, sources, tries_functions=tries_functions)
    notes += _warmup_notes(spec, sources)
    if problems and is_offline:
        problems.append(_OFFLINE)
    return RowTrialResult([*dict.fromkeys(problems)], notes)


def _warmup_notes(spec: RunSpec, opened: Mapping[str, PromptSource]) -> Iterator[str]:
    """Yields a note if the run ends before its learning rate has reached the peak, as short trials do."""
    rows = [len(opened[split]) for split in spec.data.train_sets if split in opened]
    if spec.validation.only or (spec.trainer.steps is None and not rows):
        return
    num_steps = max(0, spec.num_steps(sum(rows)) - spec.critic.warmup_steps)
    optimizer, num_updates = spec.trainer.optimizer, num_steps * spec.trainer.updates_per_step
    if 0 < num_updates < optimizer.warmup_steps:
        reached = optimizer.learning_rate * num_updates / optimizer.warmup_steps
        yield (
            f"trainer.optimizer.warmup_steps is {optimizer.warmup_steps}, but the run has {num_updates} "
            f"updates, so its learning rate ends at {reached:.3g} instead of {optimizer.learning_rate:g}; "
            "lower it, or train for more steps"
        )


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
    try:
        rows, prompts = try_rows(spec, sources, tokenizer)
    except ValueError as error:  # the model has no settings of its image processor
        problems.append(str(error))
        return []
    problems += rows.problems
    notes = [*rows.notes, *_history_notes(spec, tokenizer)]
    if problems or not tries_functions:
        return notes
    functions = try_functions(spec, prompts, tokenizer)
    problems += functions.problems
    return [*notes, *functions.notes]


def _history_notes(spec: RunSpec, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields notes about roles in text, and about earlier replies that keep what the template leaves out."""
    if not spec.data.chat_template:
        return
    is_builtin = is_builtin_tokenizer(tokenizer_name(spec.model))
    if not is_builtin and (marks := plain_role_marks(tokenizer)):
        yield (
            f"the chat template marks roles with ordinary text ({', '.join(map(repr, marks))}), which cannot "
            "be escaped: a prompt, a tool's result or a response that contains it reads like another "
            "message; remove it from the data, or use a model whose roles are control tokens"
        )
    if spec.rollout.workflow == "single_turn":
        return
    if text := kept_marks(tokenizer):
        yield (
            f"the chat template opens an answer with {text!r} and leaves it out of earlier answers; a "
            "conversation that continues recorded tokens keeps it, because the policy saw these tokens"
        )


def _collect(
    problems: list[str], step: Callable[[RunSpec], Iterator[str]], spec: RunSpec, key: str
) -> None:
    """Adds the problems of one step; ``key`` is the part of the specification that it checks."""
    try:
        with announced(key):
            problems.extend(step(spec))
    except ValueError as error:
        problems.append(str(error))
    except OSError as error:  # the path is invalid, or this user may not read it
        problems.append(_unreadable(key, error))


def _unreadable(key: str, error: OSError) -> str:
    return f"{key}: {str(error)[:_SHOWN]}; use a path that this machine can read"


def _weights(key: str, model: ModelSpec) -> Iterator[str]:
    """Yields problems that prevent a model from being loaded."""
    path = model.path
    if problem := missing_folder(path):
        raise ValueError(f"{key}.path: {problem}")
    if Path(path).is_relative_to(OBJECT_CACHE.expanduser()):
        return  # the copy of a model in an object store, without its weights
    if is_folder(path) and not any(Path(path).glob("*.safetensors")):
        for problem in other_problems(Path(path)):
            yield f"{key}.path: {problem}"
    elif is_folder(path):
        for problem in file_problems(Path(path)):
            yield f"{key}.path: {problem}"
    if model.warm_start is not None:
        examples = model.warm_start.examples
        yield from call_problems(examples, "count, seed", key=f"{key}.warm_start.examples")


def _teacher(spec: RunSpec) -> Iterator[str]:
    if spec.teacher is None or spec.teacher.is_policy:
        return
    # This imports transformers, which takes a second.
    from services.common.models.tokenizer import check_teacher, load_tokenizer

    try:
        if spec.needs_reference:
            yield from _weights("teacher", spec.teacher)
            config = read_config(spec.teacher, _vocabulary(spec.of_reference))
            yield from map(_of_teacher, _reference_problems(spec, config))
        else:
            load_tokenizer(spec.teacher)
    except (ValueError, OSError) as error:  # of functions that load any model
        raise ValueError(_of_teacher(str(error))) from error
    check_teacher(spec)


def _reference_problems(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the reasons why a teacher cannot be computed where it is loaded: in the trainer, or apart."""
    is_apart = spec.topology.own_gpus("ref_logp") > 0
    layout = spec.topology.scoring if is_apart else spec.trainer
    key = "topology.scoring" if is_apart else "trainer"
    # Processes that share the policy's experts compute all of a dense teacher.
    axes = _AXES if is_mixture(config) else _AXES[1:]
    yield from _division_problems(config, layout, key, axes=axes)
    yield from quantization_problems(config)
    yield from precision_problems(spec, config)
    if not is_apart:
        yield from untrainable(spec, config)


def _of_teacher(problem: str) -> str:
    """Returns a problem of a model with the teacher's keys."""
    for key in ("path", "tokenizer"):
        problem = problem.replace(f"model.{key}", f"teacher.{key}")
    return problem


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
    problems = [*_division_problems(config, spec.trainer, "trainer")]
    is_full = spec.model.is_tiny
    if not is_full:
        try:
            # Add values that the file leaves to the defaults of its family.
            config, is_full = {**config, **full_config(spec.model).to_dict()}, True
        except ValueError as error:
            problems = problems or [str(error)]
    yield from problems
    yield from untrainable(spec, config)
    yield from _scored_model(spec, config)
    yield from quantization_problems(config)
    yield from precision_problems(spec, config)
    yield from adapter_problems(spec, config)
    yield from mixture_problems(spec, config)
    yield from engine_problems(spec, config)
    yield from transfer_problems(spec, config)
    yield from length_problems(spec, config)
    if is_full:
        yield from quota_problems(spec, config)
        machine = MachineSettings()
        capacity = machine.queue_bytes + machine.queue_spill_bytes
        yield from batch_problems(spec, config, capacity_bytes=capacity)
    if tokenizer is not None:
        yield from token_problems(spec, config, tokenizer)


def _scored_model(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the reasons why workers that only score, or a critic, cannot divide the model."""
    yield from _division_problems(config, spec.critic, "critic")
    if spec.of_reference.model == spec.model or spec.topology.own_gpus("logp"):
        yield from _division_problems(config, spec.topology.scoring, "topology.scoring")


def _division_problems(
    config: Mapping[str, Any], layout: object, key: str, *, axes: Sequence[str] = _AXES
) -> Iterator[str]:
    """Yields the reasons why processes with the layout of a section ``key`` would not compute a model."""
    for problem in check_trainer(config, **{name: getattr(layout, name, 1) for name in axes}):
        yield problem.replace("trainer.", f"{key}.")


def _built(spec: RunSpec, *, has_workers: bool) -> Iterator[str]:
    """Yields problems of a model's modules and their sizes; called if there is no other problem."""
    if spec.trainer.lora is None and spec.model.is_tiny:
        return  # the checks below import torch
    try:
        if spec.trainer.lora is not None:
            yield from _adapter_names(spec)
        if not spec.model.is_tiny and has_workers:
            yield from memory_problems(spec, full_config(spec.model))
    except Exception as error:  # noqa: BLE001 -- a family's own code builds the model of a user's numbers
        yield (
            f"model.path {spec.model.path!r}: building a model from its config.json failed "
            f"({type(error).__name__}: {error}); correct it, or use another model"
        )


def _adapter_names(spec: RunSpec) -> Iterator[str]:
    """Yields LoRA target modules that the model does not have."""
    # This imports torch.
    from services.common.memory.sizes import shapes_of
    from services.common.models.adapters import adapted_weights, target_modules, unknown_modules

    assert spec.trainer.lora is not None
    shapes = shapes_of(model_config(spec))
    module_names = target_modules(shapes, LoraSpec())
    # Small modules may have a lower rank: their adapters are only larger than they need to be.
    ranks = [min(shape[-2:]) for shape in adapted_weights(shapes, spec.trainer.lora).values()]
    if ranks and spec.trainer.lora.rank > max(ranks):
        yield (
            f"trainer.lora.rank is {spec.trainer.lora.rank}, but the target modules of model.path have "
            f"at most rank {max(ranks)}; lower it, or remove trainer.lora to train all weights"
        )
    for target in unknown_modules(shapes, spec.trainer.lora):
        if OF_EXPERTS not in target:  # otherwise reported with the family
            yield (
                f"trainer.lora.target_modules has {target!r}, but the linear modules of model.path are "
                f"{', '.join(module_names)}; use some of these.{did_you_mean(target, module_names)}"
            )


def _vocabulary(spec: RunSpec) -> Vocabulary:
    vocabulary = builtin_vocabulary(tokenizer_name(spec.model), images=spec.model.images)
    if vocabulary is not None:
        return vocabulary
    # This imports transformers, which takes a second.
    from services.common.models.tokenizer import load_chat_tokenizer

    return load_chat_tokenizer(spec)


def _start(spec: RunSpec) -> Iterator[str]:
    checkpoint = spec.trainer.checkpoint
    if checkpoint.start_from is not None:
        try:
            for problem in _start_problems(spec, checkpoint.start_from):
                yield f"trainer.checkpoint.start_from {checkpoint.start_from!r}: {problem}"
        except (ValueError, ServiceError) as error:
            yield f"trainer.checkpoint.start_from: {error}{_weights_alone(checkpoint.start_from)}"
    yield from _weight_store(spec)
    targets = {"trainer.checkpoint": checkpoint.directory, "samples": spec.samples.directory}
    for key, url in targets.items():
        try:
            if is_url(url):
                open_checkpoints(str(url)).check()
        except ServiceError as error:
            yield f"{key}.directory: {error.message}"
    if checkpoint.directory is not None and not is_url(checkpoint.directory):
        folder = Path(checkpoint.directory).absolute()
        while not os.path.lexists(folder):  # no folder can be created at a dangling link
            folder = folder.parent
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            yield (
                f"trainer.checkpoint.directory {checkpoint.directory!r} cannot be used, because {folder} is "
                f"not a folder that can be written to ({error.strerror}); use another one, or remove the key"
            )


def _weights_alone(folder: str) -> str:
    """Returns the fix if a folder has a model's weights, but no checkpoint of a run."""
    if not is_folder(folder):
        return ""
    has_format = any((Path(folder) / FORMATS[name].marker).is_file() for name in FORMATS)
    has_weights = has_format or any(Path(folder).glob("model*.safetensors"))
    return "; it has the weights of a model: set model.path to it instead" if has_weights else ""


def _weight_store(spec: RunSpec) -> Iterator[str]:
    sync = spec.weight_sync
    if sync.storage is None or not sync.is_stored:
        return
    try:
        load_callable(TRANSPORTS[sync.backend].check)(sync.storage.directory)
    except ServiceError as error:
        yield f"weight_sync.storage.directory: {error.message}"


def _facts_of(folder: str) -> dict[str, Any]:
    """Returns the facts of a checkpoint in a folder or in an object store, without its other files."""
    if is_url(folder):
        return manifest.facts_of(fetch(join_url(folder, manifest.MANIFEST), "file").parent)
    return manifest.facts_of(Path(folder))


def _start_problems(spec: RunSpec, folder: str) -> Iterator[str]:
    """Yields reasons why the run cannot start from a checkpoint."""
    # This imports transformers, which takes a second.
    from services.common.models.tokenizer import load_tokenizer

    facts = _facts_of(folder)
    if spec.trainer.steps is not None and facts["step"] >= spec.trainer.steps:
        yield (
            f"the checkpoint was saved at step {facts['step']}, but trainer.steps is {spec.trainer.steps}, "
            "so nothing would be trained; raise trainer.steps"
        )
    config, tokenizer = model_config(spec), load_tokenizer(spec.model)
    try:
        own_facts = compatibility.model_facts(spec, config, tokenizer)
    except Exception:
        if spec.trainer.lora is None:
            raise
        return  # the model cannot be built, which is reported later
    roles = [""]
    if spec.algorithm.advantage_kind.needs_critic:
        if spec.topology.own_gpus("critic"):
            _facts_of(compatibility.critic_folder(folder))
        else:
            roles.append(compatibility.CRITIC)
    yield from compatibility.mismatches(facts, own_facts, parts=roles)


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
            source = open_source(
                source_spec, spec.data, key=f"data.{split}", needs_answers=spec.needs_answers
            )
            if source_spec.source != "environment":
                _check_rows(source, spec, split, num_demonstrations=count)
            opened[split] = source
        except ValueError as error:
            yield from str(error).split("\n")
            continue
        except OSError as error:
            yield _unreadable(f"data.{split}", error)
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
    """Yields problems of too few rows: for a step without repetition, or for epochs that train the policy."""
    sets, prompts = spec.data.train_sets, spec.trainer.prompts_per_step
    if spec.validation.only or not sets.keys() <= opened.keys():
        return
    num_rows = sum(len(opened[split]) for split in sets)
    if num_rows < prompts:
        yield (
            f"trainer.prompts_per_step is {prompts}, but data.train has {num_rows} rows, so a step would "
            "train some rows several times; lower it, or add rows"
        )
    if spec.trainer.steps is None:
        yield from critic_warmup(spec, num_steps=spec.num_steps(num_rows))


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
    rewards_by_key = (
        (f"{key}.{index}", reward)
        for key, rewards in spec.rewards.items()
        for index, reward in enumerate(rewards)
    )
    for key, reward in rewards_by_key:
        if reward.name not in REWARDS and (":" not in reward.name or "://" in reward.name):
            continue  # the environment or a service scores, or the rules say that it is unknown
        reference = REWARDS.get(reward.name, reward.name)
        if reward.name in REWARDS and not reward.arguments:
            continue  # its imports take seconds
        episode_argument = "episode" if reward.sees == "response" else "episodes"
        keywords = dict(reward.arguments) | ({episode_argument: {}} if reward.sees_episode else {})
        if reward.name in REWARDS:
            function, name = load_callable(reference), f"{key}.arguments"
            if wrong := [*argument_problems(function, reward.arguments, key=name)]:
                yield from wrong
                continue
        responses = {"response": "response", "group": "responses", "pairs": "first, second"}
        called_with = f"prompt, {responses[reward.sees]}, answer, row"
        yield from call_problems(reference, called_with, keywords, key=f"{key}.name")


def _workflow(spec: RunSpec) -> Iterator[str]:
    rollout = spec.rollout
    if rollout.workflow not in WORKFLOWS and ":" not in rollout.workflow:
        return  # the rules say so
    try:
        workflow = load_workflow(rollout)
    except (ValueError, ImportError) as error:
        for text in str(error).split("\n"):
            yield text if text.startswith("rollout.workflow") else f"rollout.workflow: {text}"
    else:
        if isinstance(workflow, CodeWorkflow):
            yield from workflow.code_problems()


def _formulas(spec: RunSpec) -> Iterator[str]:
    algorithm = spec.algorithm
    # Built-in functions are skipped because they import torch, which takes seconds.
    for key, name, builtin_names, arguments in (
        ("algorithm.loss", algorithm.loss, LOSSES, algorithm.loss_arguments),
        ("algorithm.advantage", algorithm.advantage, ADVANTAGES, algorithm.advantage_arguments),
    ):
        if name not in builtin_names and ":" in name:
            try:
                bind_callable(name, arguments, key=key)
            except ValueError as error:
                yield str(error)


def _curriculum(spec: RunSpec) -> Iterator[str]:
    curriculum = spec.data.curriculum
    if curriculum is not None and curriculum.function is not None:
        yield from call_problems(
            curriculum.function,
            "row, history",
            curriculum.arguments,
            key="data.curriculum.function",
        )
