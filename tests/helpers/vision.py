"""Tiny vision-language checkpoints, prompts with random images, and the model's own forward pass."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from services.common.models.families import language_config
from services.common.runspec.run import ModelSpec
from services.wire.data.model_inputs import ModelInputs

IMAGE, VISION_START, VISION_END = 61, 62, 63
SYMBOLS = "chars:" + "".join(chr(code) for code in range(48, 107))
PATCH = 4
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
_TOWER = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2}
_TOWERS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {
        **_TOWER,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 24,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        **_TOWER,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 24,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
KINDS = tuple(_TOWERS)


def saved_model(kind: str, folder: Path, *, seed: int = 0, tied: bool = False) -> Any:
    """Saves a random checkpoint and returns it as transformers loads it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model(
                kind,
                text_config={**_TEXT, "tie_word_embeddings": tied},
                vision_config=dict(_TOWERS[kind]),
                image_token_id=IMAGE,
                vision_start_token_id=VISION_START,
                vision_end_token_id=VISION_END,
                video_token_id=60,
                tie_word_embeddings=tied,
            ),
            dtype=torch.float32,
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def wide_config(
    kind: str, *, head_dim: int = 32, initializer_range: float = 0.1, patch: int = PATCH
) -> Any:
    """Returns the configuration of a model whose heads are as wide as external engines require.

    Args:
        patch: Pixels of a patch's side.
    """
    text = {
        **_TEXT,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 64,
        "head_dim": head_dim,
        "initializer_range": initializer_range,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8],
        },
        "tie_word_embeddings": True,
    }
    tower = {
        **_TOWERS[kind],
        "hidden_size": 2 * head_dim,
        "out_hidden_size": 4 * head_dim,
        "intermediate_size": 64,
        "patch_size": patch,
    }
    if "window_size" in tower:
        tower["window_size"] = 4 * patch
    wrapper = AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=tower,
        image_token_id=IMAGE,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        video_token_id=60,
        tie_word_embeddings=True,
    )
    return AutoConfig.for_model(**language_config(wrapper.to_dict(), images=True))


def model_spec(folder: Path) -> ModelSpec:
    """Returns the model of a folder, with images."""
    return ModelSpec(path=str(folder), tokenizer=SYMBOLS, images=True)


def random_prompt(
    rng: random.Random,
    num_images: int,
    *,
    num_tokens: int = 0,
    num_earlier: int = 0,
    patch: int = PATCH,
) -> tuple[list[int], ModelInputs]:
    """Returns a prompt or an observation with images of random sizes.

    Args:
        num_tokens: Tokens of the conversation before it.
        num_earlier: Images of the conversation before it.
        patch: Pixels of a patch's side.
    """
    tokens = [rng.randrange(3, 59) for _ in range(rng.randrange(1, 6))]
    grids, places = [], []
    for number in range(num_images):
        grid = [1, 2 * rng.randrange(1, 4), 2 * rng.randrange(1, 4)]
        tokens.append(VISION_START)
        places.append([num_earlier + number, num_tokens + len(tokens)])
        grids.append(grid)
        tokens += [IMAGE] * (grid[1] * grid[2] // 4)
        tokens += [VISION_END, *(rng.randrange(3, 59) for _ in range(rng.randrange(4)))]
    if not grids:
        return tokens, ModelInputs.from_values(None)
    patches = sum(rows * columns for _, rows, columns in grids)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    pixels = torch.randn(patches, 3 * 2 * patch * patch, generator=generator)
    values = {"pixel_values": pixels, "image_grid_thw": grids, "image_places": places}
    return tokens, ModelInputs.from_values(values)


def plain_logprobs(
    model: Any, prompt: Sequence[int], response: Sequence[int], inputs: ModelInputs
) -> Tensor:
    """Returns the logprobs of a response by the model's own unpacked forward pass.

    transformers treats a sampled placeholder token as an image and rejects the sequence. Here only the given
    places have images.
    """
    ids = torch.tensor([[*prompt, *response]])
    arguments = {name: tensor for name, tensor in inputs.tensors.items() if name != "image_places"}
    is_image = torch.zeros_like(ids, dtype=torch.bool)
    if arguments:
        counts = inputs.tensors["image_grid_thw"].prod(1) // 4
        for (_, first), count in zip(inputs.tensors["image_places"], counts, strict=True):
            is_image[0, first : first + count] = True
        arguments["mm_token_type_ids"] = is_image.int()
    find_mask = type(model.model).get_placeholder_mask.__get__(model.model)
    model.model.rope_deltas = None
    model.model.get_placeholder_mask = lambda _, **others: find_mask(
        torch.where(is_image, IMAGE, 0), **others
    )
    logits = model(input_ids=ids, use_cache=False, **arguments).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
