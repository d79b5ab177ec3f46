"""Images of requests to SGLang: the tensors that the trainer receives, at the prompt's own placeholders.

SGLang's processors are not used, because they would count placeholders and scale images themselves.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import xxhash
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from torch import Tensor, dtype

from services.common.models.vision import rotary_positions

_QWEN2_5_PATCH = 14


class ImageInputs:
    """Replaces SGLang's image processor, which its tokenizer manager calls with each request.

    Raises:
        ValueError: If SGLang would mistake the patches of this vision tower for features.
    """

    prefer_tokenized_input = True

    def __init__(self, config: Any, dtype: dtype) -> None:
        vision = config.vision_config
        if config.model_type == "qwen2_5_vl" and vision.patch_size != _QWEN2_5_PATCH:
            raise ValueError(
                f"rollout.engine is 'sglang', which takes patches of {_QWEN2_5_PATCH} pixels from "
                f"qwen2_5_vl, but the model's vision_config.patch_size is {vision.patch_size}; use 'torch' "
                "or 'vllm'"
            )
        self._tokens = config
        self._merge = int(config.vision_config.spatial_merge_size)
        self._dtype = dtype

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Makes an engine that starts while the block runs use this object."""
        with (
            patch.object(tokenizer_manager, "get_processor_wrapper", lambda: None),
            patch.object(tokenizer_manager, "get_mm_processor", lambda *_, **__: self),
        ):
            yield

    def clear_preprocess_cache(self) -> None:
        """Does nothing: nothing is cached here."""

    def shutdown(self) -> None:
        """Does nothing: nothing runs here."""

    async def process_mm_data_async(
        self,
        *,
        image_data: Sequence[Any],
        input_text: Sequence[int],
        request_obj: Any,
        **further_arguments: Any,
    ) -> MultimodalProcessorOutput:
        """Returns a request's images and positions in the form that SGLang's schedulers expect.

        Args:
            image_data: One dictionary with ``inputs``, the request's :class:`ModelInputs`.

        Raises:
            ValueError: If the prompt's placeholders are not where the images expect them, so that SGLang and
                the trainer would see different prompts.
        """
        (inputs,) = image_data
        tensors: dict[str, Tensor] = dict(inputs["inputs"].tensors)
        grids, pixels = tensors["image_grid_thw"], tensors["pixel_values"]
        pixels_of_images = pixels.split(grids.prod(-1).tolist())
        placeholder, items = int(self._tokens.image_token_id), list[MultimodalDataItem]()
        for image_pixels, grid, (_, first) in zip(
            pixels_of_images, grids, tensors["image_places"].tolist(), strict=True
        ):
            length = math.prod(grid.tolist()) // self._merge**2
            placeholder_ids = input_text[first : first + length]
            if len(placeholder_ids) != length or set(placeholder_ids) != {placeholder}:
                raise ValueError(
                    f"image {len(items)} has {length} features, but the prompt has other tokens than "
                    f"{placeholder} (image_token_id) from token {first} on"
                )
            item = MultimodalDataItem(
                modality=Modality.IMAGE,
                feature=image_pixels.to(self._dtype),
                offsets=[(first, first + length - 1)],
                model_specific_data={"image_grid_thw": grid[None]},
            )
            # SGLang caches features under this key. The extra key separates those of older weights.
            digest = xxhash.xxh3_64(image_pixels.contiguous().numpy())
            digest.update(f"{grid.tolist()} {request_obj.extra_key}".encode())
            item.set_hash(digest.intdigest())
            items.append(item)
        positions = rotary_positions(len(input_text), tensors, merge=self._merge)
        return MultimodalProcessorOutput(
            input_ids=list(input_text),
            mm_items=items,
            im_token_id=placeholder,
            im_start_id=self._tokens.vision_start_token_id,
            im_end_id=self._tokens.vision_end_token_id,
            video_token_id=self._tokens.video_token_id,
            mrope_positions=positions,
            mrope_position_delta=(positions.max() + 1 - len(input_text)).view(1, 1),
        )
