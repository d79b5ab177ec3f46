"""Models that see images: the language model of a multimodal checkpoint together with its vision tower.

transformers has such models as wrappers of two models. Here the tower is a module ``visual`` of the decoder,
so that everything that trains, sends or serves causal language models applies to them.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from services.common.models.families import image_kind

TOWER = "model.visual."
"""Prefix of the tower's tensors."""


def vision_tower(model: nn.Module) -> nn.Module | None:
    """Returns the vision tower of a model; None if it has none."""
    decoder = getattr(model, "model", None)
    tower: nn.Module | None = getattr(decoder, "visual", None)
    return tower


def checkpoint_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration of a model's checkpoint: the wrapper's if the model sees images."""
    if (kind := image_kind(config.to_dict())) is None:
        return config
    return _wrapper(kind, config.to_dict())


def _wrapper(kind: str, text: Mapping[str, Any]) -> PretrainedConfig:
    outer = {key: text[key] for key in text if key.endswith("_token_id") and key != "pad_token_id"}
    inner = {key: text[key] for key in text if key not in ("vision_config", "architectures")}
    vision = {key: v for key, v in text["vision_config"].items() if key != "model_type"}
    config: PretrainedConfig = AutoConfig.for_model(
        kind,
        text_config=inner,
        vision_config=vision,
        **outer,
        tie_word_embeddings=bool(text.get("tie_word_embeddings")),
    )
    config.architectures = [_WRAPPERS[kind]]
    tower: Any = config.vision_config
    rotary = getattr(tower, "rope_parameters", None) or {}
    if rotary.get("rope_type", "default") == "default" and hasattr(tower, "default_rope_type"):
        # transformers sets this itself, unless SGLang is imported.
        rotary["rope_type"] = tower.default_rope_type
    return config


_WRAPPERS: Mapping[str, str] = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


def set_attention(model: Any, implementation: str) -> None:
    """Sets the attention of a language model; its vision tower keeps torch's fused kernels."""
    model.set_attn_implementation(implementation)
    if (tower := vision_tower(model)) is not None:
        cast("Any", tower).set_attn_implementation("sdpa")


def register_vision(config: PretrainedConfig) -> None:
    """Lets transformers build and load the models of a configuration; does nothing if it has no images."""
    if (kind := image_kind(config.to_dict())) is not None:
        _register(kind)


@lru_cache
def _register(kind: str) -> None:
    text = type(AutoConfig.for_model(f"{kind}_text"))
    decoder = AutoModel._model_mapping[text]  # noqa: SLF001 -- transformers offers no other way
    causal = _causal_class(text, _decoder_class(kind, decoder))
    # Before transformers 5.2x, `register` ignores classes for configurations of transformers.
    AutoModelForCausalLM._model_mapping._extra_content[text] = causal  # noqa: SLF001


def _tower_class(decoder: Any, config: type) -> Any:
    """Returns the class of a configuration's tower, from the module of its decoder.

    Some versions of transformers do not list it in ``AutoModel``.
    """
    return next(
        kind
        for kind in vars(sys.modules[decoder.__module__]).values()
        if isinstance(kind, type)
        and issubclass(kind, PreTrainedModel)
        and getattr(kind, "config_class", None) is config
    )


def _decoder_class(kind: str, base: Any) -> Any:
    class Decoder(base):  # type: ignore[misc]  # the base is known at run time only
        """Decoder with a vision tower, for sequences laid end to end."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            vision = _wrapper(kind, config.to_dict()).vision_config
            self.visual = _tower_class(base, type(vision))._from_config(vision)  # noqa: SLF001

        def forward(
            self,
            input_ids: Tensor | None = None,
            pixel_values: Tensor | None = None,
            image_grid_thw: Tensor | None = None,
            image_places: Tensor | None = None,
            position_ids: Tensor | None = None,
            image_uses: Tensor | None = None,
            **arguments: Any,
        ) -> Any:
            """Computes hidden states.

            Args:
                input_ids: ``[B, T]``; ``B`` is 1 with images.
                pixel_values: ``[patches, values]`` of all images, as the model's image processor makes them.
                image_grid_thw: ``[images, 3]`` patches of each image: 1, rows, columns.
                image_places: ``[images, 2]`` number of each image in its sequence, and the position of its
                    first placeholder there.
                position_ids: ``[B, T]`` position of each token in its sequence.
                image_uses: ``[uses, 3]`` as :func:`image_arguments` returns it; default: the tokens are one
                    sequence, which has each image once.
            """
            if pixel_values is None:
                output = super().forward(
                    input_ids=input_ids, position_ids=position_ids, **arguments
                )
                if torch.is_grad_enabled() and next(self.visual.parameters()).requires_grad:
                    # Ranks reduce gradients together, so each must have those of the same parameters.
                    unused = 0 * _blank(self.visual)
                    output.last_hidden_state = output.last_hidden_state + unused
                return output
            assert input_ids is not None
            assert image_grid_thw is not None
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
            if image_uses is None:
                assert image_places is not None
                numbers, firsts = torch.arange(len(image_places)), image_places[:, 1].cpu()
                ends = torch.full_like(firsts, input_ids.shape[1])
                image_uses = torch.stack([numbers, firsts, ends], 1)
            merged = image_grid_thw[:, 1:] // self.visual.spatial_merge_size
            indices, rows, positions = _placed(
                position_ids[0], merged.tolist(), image_uses.tolist()
            )
            images = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
            image_arguments_of_decoder = _embedded(self, input_ids, indices, rows, **images)
            return super().forward(
                position_ids=positions[:, None], **image_arguments_of_decoder, **arguments
            )

        def position_offset(self, tensors: Mapping[str, Tensor]) -> int:
            """Returns what is added to the positions of tokens after a prompt with these inputs.

            The positions of an image advance by its longer side rather than by the number of its tokens.
            """
            if "image_grid_thw" not in tensors:
                return 0
            sizes = tensors["image_grid_thw"][:, 1:] // self.visual.spatial_merge_size
            return int((sizes.amax(1) - sizes.prod(1)).sum())

    return Decoder


def image_arguments(
    bundles: Sequence[Mapping[str, Tensor]],
    spans: Sequence[tuple[int, int, int]],
    device: torch.device,
) -> dict[str, Tensor]:
    """Returns the images of a pack as arguments of a decoder; equal images are passed once.

    Args:
        bundles: Inputs of prompts and observations, in the order of their tokens.
        spans: For each bundle, the place of its first token in the pack, the end of the sequences that have
            the bundle, and the position of its first token in them.

    Returns:
        ``pixel_values`` and ``image_grid_thw`` of the distinct images, and ``image_uses`` in host memory: for
        each use of an image, its number among the distinct images, the place of its first placeholder in
        the pack, and the end of the sequences that have it.
    """
    distinct: dict[tuple[str, tuple[int, ...]], int] = {}
    pixels, grids, uses = list[Tensor](), list[Tensor](), list[list[int]]()
    for tensors, (start, end, depth) in zip(bundles, spans, strict=True):
        sizes = tensors["image_grid_thw"].prod(1).tolist()
        for rows, grid, grid_position in zip(
            tensors["pixel_values"].split(sizes),
            tensors["image_grid_thw"],
            tensors["image_places"],
            strict=True,
        ):
            data = rows.contiguous().view(torch.uint8).numpy()
            key = (xxhash.xxh3_128_hexdigest(data), tuple(grid.tolist()))
            if key not in distinct:
                distinct[key] = len(distinct)
                pixels.append(rows)
                grids.append(grid)
            uses.append([distinct[key], start + int(grid_position[1]) - depth, end])
    return {
        "pixel_values": torch.cat(pixels).to(device),
        "image_grid_thw": torch.stack(grids).to(device),
        "image_uses": torch.tensor(uses),
    }


def rotary_positions(num_tokens: int, tensors: Mapping[str, Tensor], *, merge: int) -> Tensor:
    """Returns ``[3, num_tokens]`` multimodal rotary positions of a sequence with images.

    Args:
        num_tokens: Number of the sequence's tokens.
        tensors: Its images, see the decoder.
        merge: Rows and columns of patches that make one feature.
    """
    sizes = (tensors["image_grid_thw"][:, 1:] // merge).tolist()
    firsts = tensors["image_places"][:, 1].tolist()
    uses = [[number, first, num_tokens] for number, first in enumerate(firsts)]
    return _placed(torch.arange(num_tokens), sizes, uses)[2]


def _embedded(
    decoder: Any,
    input_ids: Tensor,
    indices: Tensor,
    rows: Tensor,
    *,
    pixel_values: Tensor,
    image_grid_thw: Tensor,
) -> dict[str, Any]:
    """Returns embeddings with features at some places, as arguments of a decoder.

    Args:
        input_ids: ``[1, T]``.
        indices: ``[F]`` places of the features, ascending.
        rows: ``[F]`` number of each feature among those of the distinct images.

    Raises:
        ValueError: If one of the places has no placeholder.
    """
    if not bool((input_ids[0, indices] == decoder.config.image_token_id).all()):
        raise ValueError("placeholders of images are not where image_places expects them")
    tower = decoder.visual
    tower_output = tower(pixel_values.to(tower.dtype), grid_thw=image_grid_thw, return_dict=True)
    embedded = decoder.embed_tokens(input_ids)
    features = tower_output.pooler_output.to(embedded.dtype)[rows]
    arguments = {"inputs_embeds": embedded[0].index_copy(0, indices, features)[None]}
    deepstack = getattr(tower_output, "deepstack_features", None)
    if deepstack is None:
        return arguments
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    mask[0, indices] = True
    deepstack = [layer_features[rows] for layer_features in deepstack]
    return {**arguments, "visual_pos_masks": mask, "deepstack_visual_embeds": deepstack}


def _blank(tower: Any) -> Tensor:
    """Returns the sum of all features of a blank image."""
    vision, weight = tower.config, next(tower.parameters())
    size = vision.spatial_merge_size
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(size * size, values, device=weight.device, dtype=tower.dtype)
    grid = torch.tensor([[1, size, size]], device=weight.device)
    tower_output = tower(pixels, grid_thw=grid, return_dict=True)
    features = [
        tower_output.pooler_output,
        *(getattr(tower_output, "deepstack_features", None) or ()),
    ]
    return torch.stack([feature.sum() for feature in features]).sum()


def _placed(
    depths: Tensor, sizes: list[list[int]], uses: list[list[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns where features belong, and multimodal rotary positions (Qwen2-VL, 2024).

    Args:
        depths: ``[T]`` position of each token in its sequence.
        sizes: Rows and columns of each distinct image's features.
        uses: See ``image_uses``; the images of a sequence in its order.

    Returns:
        ``[F]`` place of each feature, ``[F]`` its number among those of the distinct images, and ``[3, T]``
        positions.

    Raises:
        ValueError: If an image does not fit into its sequences.
    """
    device = depths.device
    starts = [0, *accumulate(rows * columns for rows, columns in sizes)]
    indices, numbers, positions = [], [], depths.expand(3, -1).clone()
    for number, first, end in uses:
        rows, columns = sizes[number]
        count = rows * columns
        if first + count > end:
            raise ValueError(
                f"an image has {count} features, but its sequences have {end - first} tokens from its "
                "first placeholder on"
            )
        image = torch.arange(count, device=device)
        image_tokens = first + image
        grid = torch.stack([torch.zeros_like(image), image // columns, image % columns])
        # Earlier images of the sequence have shifted the first position.
        positions[:, image_tokens] = positions[:, first : first + 1] + grid
        after = slice(first + count, end)
        positions[:, after] += max(rows, columns) - count
        indices.append(image_tokens)
        numbers.append(starts[number] + image)
    return torch.cat(indices), torch.cat(numbers), positions


def _causal_class(text: Any, decoder: Any) -> Any:
    base: Any = next(kind for kind in decoder.__mro__ if kind.__name__.endswith("PreTrainedModel"))

    class Causal(base, GenerationMixin):  # type: ignore[misc]  # the base is known at run time only
        """Causal language model of a decoder with a vision tower."""

        config_class = text
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: Tensor | None = None, **arguments: Any) -> Any:
            output = self.model(input_ids=input_ids, **arguments)
            return CausalLMOutputWithPast(
                logits=self.lm_head(output.last_hidden_state),
                past_key_values=output.past_key_values,
            )

    return Causal
