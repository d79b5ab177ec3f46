"""Families of models that are computed exactly everywhere, judged by their ``config.json`` alone.

A family is listed if a test compares its packed forward and backward pass, and the torch engine's
decoding, with the model's own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, inf
from typing import Any, Literal

Routing = Literal["softmax", "softmax_of_chosen", "sigmoid"]
"""Conversion of logits to weights: over all experts, over the chosen ones, or for each separately."""

_FULL, _WINDOW, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Types of rotary embedding whose frequencies do not depend on the longest sequence of a batch."""


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """Names of an expert's parts in a checkpoint: ``LAYER.block.experts.NUMBER.gate.weight``."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of an architecture that affect training and serving."""

    tensor_parallel: bool = False
    """True if its layers can be divided: separate projections, and any norms per head."""
    windowed: bool = False
    """True if ``sliding_window`` applies to all layers; otherwise only to those in ``layer_types``."""
    routing: Routing | None = None
    """Weighting of the chosen experts; None for a dense family."""
    expert_parts: ExpertParts | None = None
    """Names of single experts in checkpoints; None if they are also fused there."""
    recurrent: str | None = None
    """Name of the module that carries a state from token to token, in layers of ``linear_attention``.

    In a model without ``layer_types`` all layers have it, beside attention.
    """
    sinks: bool = False
    """True if each attention head has a sink: a score that takes weight and contributes no value."""
    fixed_by_alpha: bool = False
    """True if ``alpha`` fixes rotary frequencies of type ``dynamic``."""
    needs_loader: bool = False
    """True if engines compute other tensors from its weights, which only their own loaders can do."""
    exceeds_float16: bool = False
    """True if its states can exceed 65,504; vLLM refuses these families in float16."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(tensor_parallel=True),
    "qwen2": Family(tensor_parallel=True),
    "qwen3": Family(tensor_parallel=True),
    "mistral": Family(tensor_parallel=True, windowed=True),
    "ministral": Family(tensor_parallel=True),
    "phi3": Family(windowed=True),
    "olmo2": Family(),
    "olmo3": Family(),
    "glm": Family(),
    "glm4": Family(exceeds_float16=True),
    "smollm3": Family(tensor_parallel=True),
    "starcoder2": Family(windowed=True),
    "seed_oss": Family(tensor_parallel=True),
    "ernie4_5": Family(tensor_parallel=True),
    "hunyuan_v1_dense": Family(fixed_by_alpha=True),
    "exaone4": Family(tensor_parallel=True),
    "gemma": Family(tensor_parallel=True),
    "gemma2": Family(tensor_parallel=True, exceeds_float16=True),
    "gemma3_text": Family(tensor_parallel=True, exceeds_float16=True),
    "cohere": Family(),
    "cohere2": Family(),
    "granite": Family(tensor_parallel=True),
    "qwen3_5_text": Family(recurrent="linear_attn"),
    "falcon_h1": Family(recurrent="mamba", needs_loader=True),
    "qwen2_moe": Family(tensor_parallel=True, routing="softmax", expert_parts=ExpertParts()),
    "qwen3_moe": Family(
        tensor_parallel=True, windowed=True, routing="softmax", expert_parts=ExpertParts()
    ),
    "mixtral": Family(
        tensor_parallel=True,
        windowed=True,
        routing="softmax",
        expert_parts=ExpertParts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "glm4_moe": Family(tensor_parallel=True, routing="sigmoid", expert_parts=ExpertParts()),
    "deepseek_v3": Family(
        tensor_parallel=True,
        routing="sigmoid",
        expert_parts=ExpertParts(),
        needs_loader=True,
    ),
    "gpt_oss": Family(routing="softmax_of_chosen", sinks=True),
    "qwen3_next": Family(
        routing="softmax",
        expert_parts=ExpertParts(),
        recurrent="linear_attn",
    ),
    "qwen3_5_moe_text": Family(
        routing="softmax",
        expert_parts=ExpertParts(),
        recurrent="linear_attn",
    ),
}

MULTIMODAL: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Families of the language models in multimodal checkpoints, by ``model_type``.

Positions of text are the same in all three dimensions of a multimodal rotary embedding, which then equals the
plain one.
"""
IMAGES = ("qwen2_5_vl", "qwen3_vl")
"""Multimodal checkpoints that also train and serve with images (``model.images``)."""
_OUTER = ("eos_token_id", "bos_token_id", "pad_token_id", "quantization_config")
_SEEN = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

WINDOWED: Mapping[str, tuple[str, ...]] = {
    "sglang": ("olmo3", "exaone4", "gemma2", "gemma3_text", "cohere2", "gpt_oss")
}
"""Families whose sliding windows an engine computes; an engine without an entry computes those of all."""


def image_kind(config: Mapping[str, Any]) -> str | None:
    """Returns the ``model_type`` of the checkpoint of a model that sees images; None for other models."""
    kind = str(config.get("model_type"))
    return (
        kind.removesuffix("_text") if kind.endswith("_text") and "vision_config" in config else None
    )


def language_config(config: Mapping[str, Any], *, images: bool = False) -> dict[str, Any]:
    """Returns the ``config.json`` of a multimodal checkpoint's language model; other files unchanged.

    Args:
        config: A ``config.json``.
        images: True to keep what the model needs to see images: ``vision_config``, the ids of placeholders,
            and multimodal rotary positions.

    Raises:
        ValueError: If images are wanted, and the model has none that are supported.
    """
    kind = str(config.get("model_type"))
    if images and kind not in IMAGES:
        if image_kind(config) in IMAGES:  # a base model that a warm start made
            return dict(config)
        raise ValueError(
            f"model.images is true, but its model_type is {kind!r}; set model.images to false, or use one of "
            f"{', '.join(IMAGES)}"
        )
    if kind not in MULTIMODAL:
        return dict(config)
    # Older files have the keys of the text at the top.
    text = dict(config.get("text_config") or config)
    for outer in ("text_config", "vision_config", "architectures"):
        text.pop(outer, None)
    text |= {key: config[key] for key in _OUTER if text.get(key) is None and key in config}
    if config.get("tie_word_embeddings") or "tie_word_embeddings" not in text:
        text |= {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    if images or not MULTIMODAL[kind].startswith(kind):
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(table := text.get(key), Mapping):
                entries = {n: value for n, value in table.items() if images or "mrope" not in n}
                text[key] = entries | {n: "default" for n in entries if entries[n] == "mrope"}
    if images:
        vision_keys = {key: config[key] for key in (*_SEEN, "vision_config") if key in config}
        return text | vision_keys | {"model_type": f"{kind}_text"}
    return text | {"model_type": MULTIMODAL[kind]}


def check_trainer(
    config: Mapping[str, Any],
    *,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    context_parallel: int = 1,
) -> list[str]:
    """Returns the reasons why the trainer would not compute a model exactly; empty if it does.

    Args:
        config: A ``config.json``.
        tensor_parallel: Ranks that share each layer.
        expert_parallel: Ranks that share the experts of each layer.
        context_parallel: Ranks that share the tokens of each pack.
    """
    model_type = config.get("model_type")
    family = _family_of(config) if model_type in FAMILIES or image_kind(config) else None
    if family is None:
        return [
            f"model.path has model_type {model_type!r}, which is not supported; use one of "
            f"{', '.join(FAMILIES)}, or the text of {', '.join(MULTIMODAL)}"
        ]
    problems = []
    supported = (_FULL, _WINDOW) if family.recurrent is None else (_FULL, _LINEAR)
    if kinds := set(config.get("layer_types") or ()) - set(supported):
        problems.append(
            f"model.path: layer_types in its config.json has {', '.join(sorted(kinds))}, but layers of "
            f"{model_type!r} must be {' or '.join(supported)}; use a model whose layers are"
        )
    if config.get("use_bidirectional_attention"):
        problems.append(
            "model.path: use_bidirectional_attention in its config.json is true, but training needs a causal "
            "model; use a model for text generation"
        )
    problems += [
        f"model.path: rope_type {kind!r} in its config.json depends on the longest sequence of a batch, so "
        "packed sequences would influence one another; use a model with fixed frequencies"
        for kind in sorted(rope_types(config) - set(_STATIC_ROPE))
    ]
    problems += _shape_problems(config, family)
    if model_type == "falcon_h1":
        problems += _mixer_problems(config)
    if tensor_parallel > 1 and not family.tensor_parallel:
        choices = ", ".join(name for name, entry in FAMILIES.items() if entry.tensor_parallel)
        problems.append(
            f"trainer.tensor_parallel is {tensor_parallel}, but {model_type!r} does not support tensor "
            f"parallelism; set it to 1 (FSDP shards over all ranks), or use one of {choices}"
        )
    elif tensor_parallel > 1:
        problems += _tensor_problems(config, tensor_parallel)
    count = num_experts(config) if family.routing is not None else 0
    if expert_parallel > 1 and (count == 0 or count % expert_parallel):
        problems.append(
            f"trainer.expert_parallel is {expert_parallel}, but layers of model.path have {count} experts, "
            "which is not a multiple of it; set it to 1 or to a divisor"
        )
    elif tensor_parallel > 1 and count % (expert_parallel * tensor_parallel):
        problems.append(
            f"trainer.tensor_parallel is {tensor_parallel}, and its processes share experts as those of "
            f"trainer.expert_parallel ({expert_parallel}) do, but layers of model.path have {count} experts, "
            "which is not a multiple of the product; lower one of them"
        )
    if context_parallel > 1:
        problems += _context_problems(config, context_parallel, tensor_parallel)
    return problems


def _shape_problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yields inconsistent sizes, with which the model's forward pass would fail."""
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and shared and heads % shared:
        yield (
            f"model.path: num_attention_heads in its config.json is {heads}, which is not a multiple of "
            f"num_key_value_heads ({shared}); correct the file"
        )
    count, num_chosen = num_experts(config), config.get("num_experts_per_tok") or 1
    if family.routing is None or not count:
        return
    groups = num_kept = 1
    if family.routing == "sigmoid":
        groups, num_kept = config.get("n_group") or 1, config.get("topk_group") or 1
        # The score of a group is the sum of its two best experts.
        least = 2 * groups
    else:
        least = 1
    if count % groups or count < least or num_kept > groups:
        yield (
            f"model.path: its config.json has {count} experts, n_group {groups} and topk_group {num_kept}; "
            "expected groups of equal size with at least 2 experts, and topk_group from 1 to n_group"
        )
    elif num_chosen > (open_experts := count // groups * num_kept):
        yield (
            f"model.path: num_experts_per_tok in its config.json is {num_chosen}, but only {open_experts} "
            "experts are available to a token"
        )


def _mixer_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields settings of a Mamba-2 mixer that some kernels and engines ignore."""
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        yield (
            "model.path: mamba_rms_norm and mamba_norm_before_gate in its config.json are true, but kernels "
            "and engines apply the gate before the norm; use a model with mamba_norm_before_gate false"
        )
    limits = config.get("time_step_limit")
    if limits not in (None, [0.0, inf], (0.0, inf)):
        yield (
            f"model.path: time_step_limit in its config.json is {limits!r}, but engines do not limit "
            "time steps; use a model with [0.0, Infinity]"
        )


def _tensor_problems(config: Mapping[str, Any], tensor_parallel: int) -> Iterator[str]:
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = {name: config[name] for name in names if config.get(name)}
    if uneven := {name: size for name, size in sizes.items() if size % tensor_parallel}:
        uneven_sizes = ", ".join(f"{name} is {size}" for name, size in uneven.items())
        yield (
            f"trainer.tensor_parallel is {tensor_parallel}, but in the config.json of model.path "
            f"{uneven_sizes}, which must be multiples of it; set it to a divisor of {gcd(*sizes.values())}"
        )


def _context_problems(
    config: Mapping[str, Any], context_parallel: int, tensor_parallel: int
) -> Iterator[str]:
    heads = config.get("num_attention_heads") or 0
    local_heads = heads // tensor_parallel
    if local_heads % context_parallel:
        divided = f", {local_heads} on each of {tensor_parallel} tensor-parallel processes"
        yield (
            f"trainer.context_parallel is {context_parallel}, but layers of model.path have {heads} "
            f"attention heads{divided if tensor_parallel > 1 else ''}; set it to a divisor of {local_heads}"
        )


def _family_of(config: Mapping[str, Any]) -> Family:
    kind = image_kind(config)
    if kind in IMAGES:
        # Tensor parallelism would divide the language model only.
        return replace(FAMILIES[MULTIMODAL[kind]], tensor_parallel=False)
    return FAMILIES.get(str(config.get("model_type")), Family())


def num_experts(config: Mapping[str, Any]) -> int:
    """Returns the number of routed experts of a layer, under any of the usual names; 0 if there is none."""
    return _stated_experts(config) or 0


def _stated_experts(config: Mapping[str, Any]) -> int | None:
    """Returns the number of routed experts that a configuration states; None if it does not."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name) is not None), None)


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Returns True if a model has layers of experts; Qwen3-Next with ``num_experts: 0`` has none."""
    return _family_of(config).routing is not None and _stated_experts(config) != 0


def has_plain_scores(config: Mapping[str, Any]) -> bool:
    """Returns True if fused attention kernels can compute a model's scores: without caps and sinks.

    Gemma 2 without its caps is excluded, too: transformers refuses the kernels for that family.
    """
    if config.get("model_type") == "gemma2" or config.get("attn_logit_softcapping") is not None:
        return False
    return not _family_of(config).sinks


def recurrent_module(config: Mapping[str, Any]) -> str | None:
    """Returns the name of a model's modules that carry a state from token to token; None without any."""
    return _family_of(config).recurrent


def num_attention_layers(config: Mapping[str, Any]) -> int:
    """Returns the number of layers that attend to earlier tokens, and keep their keys and values."""
    kinds = config.get("layer_types") or [_FULL] * int(config["num_hidden_layers"])
    return sum(kind != _LINEAR for kind in kinds)


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Sizes of a model's recurrent layers."""

    num_layers: int
    """Number of layers that have one."""
    channels: int
    """Channels of the short convolution, per token."""
    width: int
    """Width of the output, and of its gate, per token."""
    state: int
    """Numbers in the state of one layer."""


def recurrent_shape(config: Mapping[str, Any]) -> RecurrentShape | None:
    """Returns the sizes of a model's recurrent layers; None if it has none.

    Args:
        config: A model's configuration, including defaults.
    """
    if recurrent_module(config) is None:
        return None
    if config.get("model_type") == "falcon_h1":
        width = config["mamba_n_heads"] * config["mamba_d_head"]
        per_group = config["mamba_d_state"]
        channels = width + 2 * config["mamba_n_groups"] * per_group
        return RecurrentShape(config["num_hidden_layers"], channels, width, width * per_group)
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    width = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return RecurrentShape(
        num_layers=config["num_hidden_layers"] - num_attention_layers(config),
        channels=2 * keys + width,
        width=width,
        state=width * config["linear_key_head_dim"],
    )


def windows_of(config: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns the number of tokens that a layer attends to, including its own; None for all earlier ones.

    Args:
        config: A ``config.json``. A model with one kind of layers has the entry ``full_attention``
            or ``sliding_attention``. Recurrent layers, which attend to nothing, have no entry.
    """
    kinds = config.get("layer_types")
    if not kinds:
        family = _family_of(config)
        is_windowed = family.windowed and config.get("use_sliding_window") is not False
        kinds = [_WINDOW if is_windowed else _FULL]
    return {
        kind: config.get("sliding_window") if kind == _WINDOW else None
        for kind in kinds
        if kind != _LINEAR
    }


def exact_tokens(config: Mapping[str, Any], engine: str) -> int | None:
    """Returns the max. tokens of a context that an engine computes exactly; None if there is no limit.

    An engine that ignores the sliding windows of a model is exact up to the smallest window.

    Args:
        config: A ``config.json``.
    """
    windowed_types = WINDOWED.get(engine)
    if windowed_types is None or config.get("model_type") in windowed_types:
        return None
    return min((size for size in windows_of(config).values() if size is not None), default=None)


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """Returns the types of rotary embedding, one for the model or one per kind of layer."""
    # The older key takes precedence if a configuration has both.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    tables = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    is_fixed = _family_of(config).fixed_by_alpha
    kinds = {
        table.get("rope_type") or table.get("type")
        for table in tables
        if not (is_fixed and table.get("alpha"))
    }
    return {str(kind) for kind in kinds if kind is not None}


_MAX_UINT8 = 255


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """Layers and experts of a mixture of experts."""

    layers: tuple[int, ...]
    """Numbers of the layers that have experts."""
    num_chosen: int
    """Number of experts per token in each of them."""
    num_experts: int
    """Number of experts per layer."""

    @property
    def dtype(self) -> str:
        """Smallest dtype for all experts and ``missing``."""
        return "uint8" if self.num_experts <= _MAX_UINT8 else "int16"

    @property
    def missing(self) -> int:
        """Marks an unknown choice: the highest value of the dtype, which is no expert."""
        return _MAX_UINT8 if self.dtype == "uint8" else 2**15 - 1

    @property
    def tail(self) -> tuple[int, int]:
        """Shape of one token's entry."""
        return len(self.layers), self.num_chosen


def routing_shape(config: Mapping[str, Any]) -> RoutingShape | None:
    """Returns the routing shape of a model; None if it has no routers.

    Args:
        config: A model's configuration, including defaults.
    """
    if not is_mixture(config):
        return None
    dense = set(config.get("mlp_only_layers") or ()) | set(
        range(config.get("first_k_dense_replace") or 0)
    )
    every = config.get("decoder_sparse_step") or 1
    return RoutingShape(
        layers=tuple(
            layer
            for layer in range(config["num_hidden_layers"])
            if layer not in dense and (layer + 1) % every == 0
        ),
        num_chosen=int(config["num_experts_per_tok"]),
        num_experts=num_experts(config),
    )
