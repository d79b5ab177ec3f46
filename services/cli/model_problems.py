"""Checks of a specification against the ``config.json`` of its model."""

from collections.abc import Iterator, Mapping
from typing import Any

from services.common.models.families import FAMILIES, Family, attention_modules, exact_tokens
from services.common.models.made_tokenizers import Vocabulary
from services.common.models.routing_shape import routing_shape
from services.common.models.tokenizer import Tokenizer
from services.common.runspec.engines import engine_kind
from services.common.runspec.rules import batch_bytes, quota
from services.common.runspec.run import RunSpec
from services.common.runspec.trainer import OF_EXPERTS
from services.rollout.engines.stop_texts import split_stop_texts
from services.rollout.workflows.base import load_workflow
from services.rollout.workflows.multi_turn import MultiTurn


def quantization_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a problem if the weights have 4 or 8 bits, which training and weight transfer do not support."""
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        yield (
            f"model.path has quantized weights (quantization_config in its config.json is {method!r}); use a "
            "copy in bfloat16"
        )


def adapter_problems(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields problems of LoRA targets that have other names in this model family, or do not exist."""
    if spec.trainer.lora is None or config.get("model_type") not in FAMILIES:
        return
    named, own = spec.trainer.lora.target_modules, attention_modules(config)
    if missing := [
        name for name in Family().attention_modules if name in named and name not in own
    ]:
        yield (
            f"trainer.lora.target_modules has {', '.join(missing)}, but the attention modules of "
            f"{config['model_type']!r} are {', '.join(own)}; use these"
        )
    if spec.trainer.lora.adapts_experts and FAMILIES[config["model_type"]].routing is None:
        yield (
            f"trainer.lora.target_modules has experts, but {config['model_type']!r} has none; remove "
            f"{', '.join(name for name in named if OF_EXPERTS in name)}"
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


def mixture_problems(spec: RunSpec, config: Mapping[str, Any]) -> list[str]:
    """Returns problems of settings for experts that the model does not have."""
    family = FAMILIES.get(str(config.get("model_type")))
    routing = None if family is None else family.routing
    balancing, problems = spec.trainer.balancing, []
    wanted = {
        "rollout.routing_replay": (spec.rollout.routing_replay, "off"),
        "trainer.balancing.kind": (balancing.kind, "none"),
    }
    problems += [
        f"{key} is {value!r}, but model.path has model_type {config.get('model_type')!r} without experts; "
        f"set it to {off!r}"
        for key, (value, off) in wanted.items()
        if value != off and routing is None
    ]
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
    needed = batch_bytes(spec, expert_bytes=_expert_bytes(spec, config))
    if capacity_bytes < needed <= spec.transferqueue.quota_bytes:
        yield (
            f"trainer.prompts_per_step is {spec.trainer.prompts_per_step}: with rollout.group_size "
            f"({spec.rollout.group_size}) and rollout.max_response_tokens "
            f"({spec.rollout.max_response_tokens}) a batch may take {needed:,} bytes, but the transferqueue "
            f"of this machine has {capacity_bytes:,}; lower one of them, or raise "
            "SLIPSTREAM_TRANSFERQUEUE_CAPACITY_BYTES"
        )


def _expert_bytes(spec: RunSpec, config: Mapping[str, Any]) -> int:
    """Returns the bytes per token of the chosen experts, if the run stores them."""
    routing = routing_shape(config)
    if routing is None or spec.rollout.routing_replay == "off":
        return 0
    layers, chosen = routing.tail
    return int(layers * chosen * (1 if routing.dtype == "uint8" else 2))


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
    most = max(vocab_size or 0, tokenizer.vocab_size)
    if unknown := [each for each in spec.rollout.sampling.stop_token_ids if each >= most]:
        yield (
            f"rollout.sampling.stop_token_ids has {', '.join(map(str, unknown))}, but model.path has "
            f"{most} tokens; use ids from 0 to {most - 1}"
        )
    if isinstance(tokenizer, Tokenizer):
        try:
            split_stop_texts(spec.rollout.sampling.stop, tokenizer)
        except ValueError as error:
            yield f"rollout.sampling.stop: {error}"
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
        if isinstance(workflow, MultiTurn):
            is_used = spec.data.chat_template
            workflow.check(tokenizer if is_used and isinstance(tokenizer, Tokenizer) else None)
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
