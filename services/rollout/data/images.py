"""Images of prompts and observations: reads and decodes them within limits, and makes the model's inputs.

A row has images in a column, or as parts of its messages; an observation has them as parts. Each becomes one
placeholder in the tokens, which is then repeated for every feature of the image.
"""

import asyncio
import base64
import binascii
import io
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import numpy as np
from PIL import ExifTags, Image, ImageOps

from services.common.models.configs import PRESET_PATCH, read_config
from services.common.models.tokenizer import Tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.run import ModelSpec
from services.common.security.confinement import CodePolicy
from services.rollout.calls.outside import AddressPolicy, ExternalService
from services.rollout.failures import BusyError, CallError, GroupError, refused_prompt

if TYPE_CHECKING:
    from services.wire.data.model_inputs import ModelInputs

MARK: Final = "<image>"
"""Text that marks the place of an image in the text of a row with images."""
_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
_MAX_DECODED_PIXELS: Final = 64 << 20
"""Max pixels of an image before it is scaled down: a few bytes may decode to gigabytes."""
_MAX_SIDE: Final = 1 << 16
"""Max width and height; each row takes memory, however short it is."""
_MAX_BYTE: Final = 255
_BYTES_PER_PIXEL: Final = 32
"""RGB, and the values in float32 before and after they become patches, which repeat them."""
# Held while an image is in memory at its full size, because many prompts are read at once.
_DECODING: Final = threading.Lock()
_FETCH_TIMEOUT_S: Final = 30.0
_THUMBNAIL: Final = (192, 192)
_SIZE: Final = "size_in_data"
_PLACES: Final = "image_places"
_URLS: Final = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a prompt or an observation as it is shown to people."""

    name: str
    """Path or address; empty for bytes."""
    size: tuple[int, int]
    """Width and height of the image in the data, in pixels."""
    thumbnail: str
    """Data URL of a small copy."""


class ImageReader:
    """Reads the images of prompts and observations for one model.

    Args:
        model: A model with ``images``.
        data: Specification with the image column and the limits.
        allowance: Files that rows may name.
        reach: Addresses that rows may name.

    Raises:
        ValueError: If the model has no image processor.
    """

    def __init__(
        self,
        model: ModelSpec,
        data: DataSpec,
        tokenizer: Tokenizer,
        *,
        allowance: CodePolicy,
        reach: AddressPolicy,
    ) -> None:
        self._data = data
        self._allowance = allowance
        self._reach = reach
        config = read_config(model, tokenizer)
        self._placeholder = int(config["image_token_id"])
        around = (config.get("vision_start_token_id"), config.get("vision_end_token_id"))
        before, after = ([] if token_id is None else [int(token_id)] for token_id in around)
        self.mark_ids = [*before, self._placeholder, *after]
        """Tokens of one image in a text without chat template."""
        self._processor: Any = _processor(model)

    @property
    def max_request_bytes(self) -> int:
        """Max size of the images of a conversation as base64."""
        return self._data.max_images * self._data.max_image_bytes * 4 // 3

    @property
    def max_decoded_bytes(self) -> int:
        """Max memory of one image while it becomes inputs of the model."""
        return self._data.max_image_pixels * _BYTES_PER_PIXEL

    def inputs_of(
        self,
        token_ids: Sequence[int],
        sources: Sequence[Any],
        *,
        folder: Path | None,
        origin: str,
        num_tokens: int = 0,
        earlier: "ModelInputs | None" = None,
    ) -> tuple[list[int], "ModelInputs", tuple[Picture, ...]]:
        """Reads images and returns tokens with all placeholders, the model's inputs, and the pictures.

        Args:
            token_ids: Tokens of the prompt or the observation, with one placeholder for each image.
            sources: The images as the row or the observation has them, in order.
            folder: Folder that paths are relative to; None forbids paths.
            origin: Name of the row or the observation, for error messages.
            num_tokens: Number of tokens of the conversation before these.
            earlier: Earlier images of the conversation, which count towards ``data.max_images``.

        Raises:
            GroupError: If an image is missing, forbidden, broken or too large, or there are too many.
        """
        from services.wire.data.model_inputs import ModelInputs

        marks = sum(id_ == self._placeholder for id_ in token_ids)
        if marks != len(sources):
            raise refused_prompt(
                "prompt_malformed",
                f"{origin} has {len(sources)} images, but its text has {marks} places for them; mark each "
                f"place with {MARK}, or none",
            )
        if sources and token_ids[-1] == self._placeholder:
            raise refused_prompt(
                "prompt_malformed",
                f"{origin} ends with an image, but the model answers after text; add text after it",
            )
        num_earlier = len(earlier.tensors.get(_PLACES, ())) if earlier is not None else 0
        if num_earlier + len(sources) > self._data.max_images:
            after = f" after {num_earlier} others" * (num_earlier > 0)
            raise refused_prompt(
                "too_many_images",
                f"{origin} has {len(sources)} images{after}, more than data.max_images "
                f"({self._data.max_images}); raise it or use fewer",
            )
        if not sources:
            return list(token_ids), ModelInputs.from_values(None), ()
        named_sources = [(f"image {n} of {origin}", source) for n, source in enumerate(sources)]
        images = [self._read(source, folder, name) for name, source in named_sources]
        pictures = [_picture(image, source) for image, source in zip(images, sources, strict=True)]
        try:
            pixels = self._processor(images=images, return_tensors="pt")
        except ValueError as error:
            raise refused_prompt(
                "image_invalid", f"{origin}: the model's processor refuses an image: {error}"
            ) from error
        values = {name: pixels[name] for name in ("pixel_values", "image_grid_thw")}
        expanded, inputs = self.with_places(
            token_ids, values, num_tokens=num_tokens, num_earlier=num_earlier
        )
        return expanded, inputs, tuple(pictures)

    def with_places(
        self,
        token_ids: Sequence[int],
        tensors: Mapping[str, Any],
        *,
        num_tokens: int = 0,
        num_earlier: int = 0,
    ) -> tuple[list[int], "ModelInputs"]:
        """Returns tokens with all placeholders, and the model's inputs with their places.

        Args:
            token_ids: Tokens with one placeholder for each image.
            tensors: Model inputs of these images; places among them are replaced.
            num_tokens: Number of tokens of the conversation before these.
            num_earlier: Number of images of the conversation before these.
        """
        from services.wire.data.model_inputs import ModelInputs

        merge = self._processor.merge_size**2
        counts = [math.prod(grid) // merge for grid in tensors["image_grid_thw"].tolist()]
        expanded, spans = list[int](), list[list[int]]()
        for id_ in token_ids:
            if id_ == self._placeholder and len(spans) < len(counts):
                spans.append([num_earlier + len(spans), num_tokens + len(expanded)])
                expanded += [id_] * counts[len(spans) - 1]
            else:
                expanded.append(id_)
        return expanded, ModelInputs.from_values({**tensors, _PLACES: spans})

    def _read(self, source: Any, folder: Path | None, name: str) -> Image.Image:
        """Returns an image as viewers show it, in RGB, with at most ``data.max_image_pixels``.

        Its ``info`` has the size of the image in the data.
        """
        try:
            image = self._opened(source, folder, name)
            if image.width * image.height > _MAX_DECODED_PIXELS or max(image.size) > _MAX_SIDE:
                raise refused_prompt(
                    "image_too_large",
                    f"{name} has {image.width} x {image.height} pixels, more than {_MAX_DECODED_PIXELS:,}, "
                    f"or {_MAX_SIDE:,} on a side; scale it down",
                )
            with _DECODING:
                upright = _as_shown(image)
                smaller = _scaled_down(upright, self._data.max_image_pixels)
                smaller.info = {_SIZE: upright.size}
                return smaller
        except Image.DecompressionBombError as error:
            raise refused_prompt("image_too_large", f"{name}: {error}") from error
        except (OSError, ValueError, SyntaxError) as error:
            raise refused_prompt(
                "image_invalid",
                f"{name} cannot be decoded ({error}); expected {', '.join(_FORMATS)}",
            ) from error

    def _opened(self, source: Any, folder: Path | None, name: str) -> Image.Image:
        """Returns an image whose size is known and whose pixels may not be decoded yet."""
        if isinstance(source, Image.Image):  # of a data set with decoded images
            return source
        content = self._content(source, folder, name)
        limit = self._data.max_image_bytes
        if len(content) > limit:
            raise _too_large(name, len(content), limit)
        return Image.open(io.BytesIO(content), formats=_FORMATS)

    def _content(self, source: Any, folder: Path | None, name: str) -> bytes:
        """Returns the encoded image."""
        if isinstance(source, Mapping):
            inner = next((source[key] for key in ("bytes", "path", "url") if source.get(key)), None)
            if inner is not None:
                return self._content(inner, folder, name)
        if isinstance(source, bytes | bytearray):
            return bytes(source)
        if not isinstance(source, str) or not source or "\0" in source:
            raise refused_prompt(
                "image_invalid",
                f"{name} must be a path, a data URL, an http(s) URL or bytes, got {source!r:.60}",
            )
        if source.startswith("data:"):
            return _decoded(source, name, self._data.max_image_bytes)
        if source.startswith(_URLS):
            return self._fetched(source, name)
        if folder is None:
            raise refused_prompt(
                "image_forbidden",
                f"{name} is {source!r:.60}, but only rows of data may name files; send a data URL",
            )
        return self._file(folder / source.removeprefix("file://"), name)

    def _file(self, path: Path, name: str) -> bytes:
        problems = self._allowance.path_problems(path)
        if problems:
            raise refused_prompt("image_forbidden", f"{name}: {problems[0]}")
        try:
            if not path.is_file():
                raise refused_prompt(
                    "image_missing", f"{name}: there is no file {str(path)!r}; correct the row"
                )
            if (size := path.stat().st_size) > self._data.max_image_bytes:
                raise _too_large(name, size, self._data.max_image_bytes)
            return path.read_bytes()
        except (OSError, ValueError) as error:
            raise refused_prompt(
                "image_missing", f"{name}: {str(path)!r} cannot be read: {error}"
            ) from error

    def _fetched(self, url: str, name: str) -> bytes:
        async def fetch() -> bytes:
            service = ExternalService(
                url, reach=self._reach, max_answer_bytes=self._data.max_image_bytes
            )
            try:
                async with asyncio.timeout(_FETCH_TIMEOUT_S):
                    response = await service.send("GET", "")
            finally:
                await service.close()
            if response.status_code != httpx.codes.OK:
                raise refused_prompt(
                    "image_missing", f"{name}: {url} answered with status {response.status_code}"
                )
            return response.content

        try:
            return asyncio.run(fetch())
        except CallError as error:
            raise refused_prompt("image_forbidden", f"{name}: {error.message}") from error
        except (BusyError, TimeoutError, httpx.TransportError) as error:
            raise GroupError(
                "image_unreachable", f"{name}: {url} cannot be fetched now: {error}", retryable=True
            ) from error
        except (httpx.InvalidURL, ValueError) as error:
            raise refused_prompt(
                "image_invalid", f"{name}: {url!r:.80} is no URL: {error}"
            ) from error


def with_parts(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns messages with one content part per image, and the images in the order of these parts.

    Args:
        messages: Chat messages; their content is text, or a list of parts.
        images: Images of the row's column. Marks and parts without an image take them in order; if there are
            neither, the images precede the text of the first user message.
    """
    rest, used_images = list(images), list[Any]()
    split = [list(_parts_of(line["content"], marks=bool(images))) for line in messages]
    if all(part["type"] == "text" for parts in split for part in parts):
        users = (n for n, message in enumerate(messages) if message["role"] == "user")
        split[next(users, 0)][:0] = [{"type": "image"} for _ in rest]
    split_messages = []
    for message, parts in zip(messages, split, strict=True):
        for index, part in enumerate(parts):
            if part["type"] == "text":
                continue
            image = _own_image(part)
            if image is None and rest:
                image = rest.pop(0)
            used_images += [] if image is None else [image]
            parts[index] = {"type": "image"}
        is_text = isinstance(message["content"], str) and [p["type"] for p in parts] == ["text"]
        split_messages.append({**message, "content": message["content"] if is_text else parts})
    return split_messages, used_images + rest


def has_images(value: Any) -> bool:
    """Returns True if a tool's result is a list of parts of a message, at least one of which is an image."""
    if not isinstance(value, list) or not value:
        return False
    types = [part.get("type") if isinstance(part, dict) else None for part in value]
    return set(types) <= {"text", "image", "image_url"} and set(types) != {"text"}


def _parts_of(text: Any, *, marks: bool) -> Iterator[dict[str, Any]]:
    """Yields the parts of a message; with ``marks``, each mark in its text becomes an image part."""
    if not isinstance(text, str):
        # Templates ask for a key such as 'image', whatever its value.
        yield from ({k: v for k, v in part.items() if v is not None} for part in text)
        return
    pieces = text.split(MARK) if marks else [text]
    for number, piece in enumerate(pieces):
        if number:
            yield {"type": "image"}
        if piece or len(pieces) == 1:
            yield {"type": "text", "text": piece}


def _own_image(part: Mapping[str, Any]) -> Any:
    url = part.get("image_url")
    source = url.get("url") if isinstance(url, Mapping) else url
    return source or next((part[k] for k in ("image", "url", "path", "bytes") if part.get(k)), None)


def _processor(model: ModelSpec) -> Any:
    if model.is_tiny:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        side = 2 * PRESET_PATCH
        size = {"shortest_edge": side * side, "longest_edge": 64 * side * side}
        return Qwen2VLImageProcessorPil(patch_size=PRESET_PATCH, size=size)
    from transformers import AutoImageProcessor

    auto: Any = AutoImageProcessor
    try:
        return auto.from_pretrained(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        raise ValueError(
            f"model.images is true, but the image processor of model.path {model.path!r} cannot be loaded "
            f"({str(error)[:200]}); a folder needs the preprocessor_config.json of the original model"
        ) from error


def _as_shown(image: Image.Image) -> Image.Image:
    """Returns an image in RGB: upright, with all levels of 16-bit and fractional grey, on white.

    Each copy of a large image takes hundreds of megabytes, so there is none that is not needed.
    """
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        values = values * _MAX_BYTE if values.max() <= 1.0 else values
        return Image.fromarray(values.round().clip(0, _MAX_BYTE).astype(np.uint8)).convert("RGB")
    if image.mode.startswith("I"):
        levels = np.asarray(image)
        is_16_bit = image.mode != "I" or levels.max() > _MAX_BYTE
        levels = levels >> 8 if is_16_bit else levels
        return Image.fromarray(levels.clip(0, _MAX_BYTE).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    canvas = Image.new("RGB", image.size, "white")
    canvas.paste(image, mask=image.getchannel("A"))
    return canvas


def _scaled_down(image: Image.Image, max_pixels: int) -> Image.Image:
    factor = math.sqrt(max_pixels / (image.width * image.height))
    if factor >= 1:
        return image
    return image.resize(_sides(image, factor), Image.Resampling.BICUBIC)


def _picture(image: Image.Image, source: Any) -> Picture:
    factor = min(1.0, *(limit / side for limit, side in zip(_THUMBNAIL, image.size, strict=True)))
    small = image if factor == 1 else image.resize(_sides(image, factor))
    buffer = io.BytesIO()
    small.save(buffer, "PNG" if small.width * small.height <= 64 * 64 else "JPEG")
    kind = "png" if buffer.getvalue()[1:4] == b"PNG" else "jpeg"
    data = base64.b64encode(buffer.getvalue()).decode()
    if isinstance(source, Mapping):
        source = source.get("path") or source.get("url") or ""
    name = source if isinstance(source, str) and not source.startswith("data:") else ""
    return Picture(name[:200], image.info[_SIZE], f"data:image/{kind};base64,{data}")


def _sides(image: Image.Image, factor: float) -> tuple[int, int]:
    return max(1, int(image.width * factor)), max(1, int(image.height * factor))


def _decoded(url: str, name: str, max_bytes: int) -> bytes:
    head, separator, data = url.partition(",")
    if not separator or not head.endswith(";base64"):
        raise refused_prompt(
            "image_invalid",
            f"{name} must be a data URL 'data:image/...;base64,...', got {head!r:.60}",
        )
    if len(data) > 2 * max_bytes:
        raise _too_large(name, len(data) * 3 // 4, max_bytes)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused_prompt("image_invalid", f"{name} is no base64: {error}") from error


def _too_large(name: str, size: int, limit: int) -> GroupError:
    return refused_prompt(
        "image_too_large",
        f"{name} has {size:,} bytes, more than data.max_image_bytes ({limit:,}); raise it or remove the row",
    )
