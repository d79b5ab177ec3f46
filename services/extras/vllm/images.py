"""Images of requests to vLLM: the tensors that the trainer receives, at the prompt's own placeholders.

vLLM's processors are not used, because they would count placeholders and scale images themselves. Importing
this module replaces the functions of vLLM that need processors, and one that drops images of requests. All
processes of an engine import it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import xxhash
from torch import dtype
from vllm.multimodal import encoder_budget
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.renderers import BaseRenderer
from vllm.v1.core.sched import output

from services.extras.vllm.kind import MAX_IMAGE_TOKENS

if TYPE_CHECKING:
    from services.wire.data.model_inputs import ModelInputs


def image_arguments(max_images: int, max_tokens: int) -> dict[str, Any]:
    """Returns arguments of vLLM for a model that takes images.

    Args:
        max_images: Max images of one prompt.
        max_tokens: Max tokens of one image.
    """
    # The engine's further processes do not need it.
    from vllm.engine.arg_utils import AsyncEngineArgs

    head = {"head_dtype": "float32"}
    arguments = {
        "limit_mm_per_prompt": {"image": max_images, "video": 0},
        "hf_overrides": {**head, "text_config": head, MAX_IMAGE_TOKENS: max_tokens},
        # Requests contain processed images with their digests.
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,
        "skip_mm_profiling": True,
    }
    names = {field.name for field in fields(AsyncEngineArgs)}
    return {name: value for name, value in arguments.items() if name in names}


def _max_tokens_per_item(*arguments: Any, **keywords: Any) -> Mapping[str, int]:
    """Returns the max tokens of an image; the arguments differ between versions of vLLM."""
    values = [*arguments, *keywords.values()]
    processor = next(value for value in values if isinstance(value, BaseMultiModalProcessor))
    config = processor.info.ctx.model_config.hf_config
    return {"image": int(getattr(config, MAX_IMAGE_TOKENS))}


encoder_budget.get_mm_max_toks_per_item = _max_tokens_per_item
# Processors would need a tokenizer to find placeholders.
BaseMultiModalProcessor.requires_tokenizer = False
BaseRenderer.warmup_mm = lambda _: None  # it would fail and warn


def _all_features(features: list[Any], *_: Any, **__: Any) -> list[Any]:
    return features


# vLLM drops an image if its tokens are in the prefix cache when a request starts. After an update of weights
# the request needs it again, and the engine would die. Version 0.26 keeps all images.
output.strip_covered_mm_data = _all_features


class ImageInputs:
    """Converts prompts with images to vLLM's inputs."""

    def __init__(self, config: Any, dtype: dtype) -> None:
        self._placeholder = int(config.image_token_id)
        self._merged = int(config.vision_config.spatial_merge_size) ** 2
        self._dtype = dtype

    def of(self, token_ids: Sequence[int], inputs: "ModelInputs") -> dict[str, Any]:
        """Returns the entries of a vLLM input that differ from those of an input without images.

        Args:
            token_ids: The prompt, and any tokens after it.
            inputs: Images of the prompt.

        Raises:
            ValueError: If the prompt's placeholders are not where the images expect them, so that vLLM and
                the trainer would see different prompts.
        """
        tensors = inputs.tensors
        grids, pixels = tensors["image_grid_thw"], tensors["pixel_values"]
        sizes = grids.prod(-1)
        items = MultiModalKwargsItems.from_hf_inputs(
            {"pixel_values": pixels.to(self._dtype), "image_grid_thw": grids},
            {
                "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
                "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            },
        )
        firsts = [first for _, first in tensors["image_places"].tolist()]
        positions = [
            PlaceholderRange(offset=first, length=math.prod(grid) // self._merged)
            for first, grid in zip(firsts, grids.tolist(), strict=True)
        ]
        for number, position in enumerate(positions):
            placeholder_ids = token_ids[position.offset : position.offset + position.length]
            if len(placeholder_ids) != position.length or set(placeholder_ids) != {
                self._placeholder
            }:
                raise ValueError(
                    f"image {number} has {position.length} features, but the prompt has other tokens than "
                    f"{self._placeholder} (image_token_id) from token {position.offset} on"
                )
        pixels_of_images = pixels.split(sizes.tolist())
        return {
            "type": "multimodal",
            "mm_kwargs": items,
            "mm_placeholders": {"image": positions},
            # Keys of the prefix cache and of the encoder cache.
            "mm_hashes": {
                "image": [
                    f"{xxhash.xxh3_128_hexdigest(image.contiguous().numpy())}-{'x'.join(map(str, grid))}"
                    for image, grid in zip(pixels_of_images, grids.tolist(), strict=True)
                ]
            },
        }
