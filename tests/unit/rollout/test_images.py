"""Images of prompts from a row to an engine: limits, errors of single prompts, tokens, and decoding."""

import asyncio
import base64
import io
import json
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from services.checks.start.rows import try_rows
from services.common.models.loading import load_model
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.loader import SpecError
from services.common.runspec.run import ModelSpec
from services.common.security.confinement import CodePolicy
from services.rollout.calls.outside import AddressPolicy
from services.rollout.data.images import ImageReader
from services.rollout.data.prompts import PromptStore
from services.rollout.engines.torch.engine import TorchEngine
from services.rollout.failures import GroupError
from tests.helpers.batches import spec_of
from tests.helpers.engines import request, running
from tests.helpers.specs import spec_with
from tests.helpers.vision import (
    IMAGE,
    KINDS,
    model_spec,
    plain_logprobs,
    random_prompt,
    saved_model,
)

MODEL = ModelSpec(path="tiny:qwen2_5_vl-0.6m", tokenizer="chars:abc :\nusertin<mg>", images=True)


def png(width: int = 16, height: int = 16, color: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, "PNG")
    return buffer.getvalue()


def bomb(width: int = 100_000, height: int = 100_000) -> bytes:
    """Returns a PNG of a few bytes whose header declares a large image, by default of 10 gigapixels."""
    content = png()
    sides = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    header = content[12:16] + sides + content[24:29]
    return content[:12] + header + zlib.crc32(header).to_bytes(4, "big") + content[33:]


def store(
    *rows: Mapping[str, Any],
    folder: Path = Path(),
    roots: tuple[Path, ...] = (),
    model: ModelSpec = MODEL,
    inner: tuple[str, ...] = (),
    **changes: Any,
) -> PromptStore:
    values = {"train": {"source": "jsonl", "path": str(folder / "rows.jsonl")}, **changes}
    data = DataSpec(**{"answer_column": None, **values})  # type: ignore[arg-type]
    tokenizer = load_tokenizer(model)
    reader = ImageReader(
        model, data, tokenizer, allowance=CodePolicy(roots=roots), reach=AddressPolicy(inner)
    )
    return PromptStore(data, {"train": list(rows)}, tokenizer, images=reader)  # type: ignore[dict-item]


def test_an_image_becomes_a_placeholder_for_each_of_its_features(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png(32, 16))
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    whole = load_tokenizer(MODEL).special_tokens["<image>"]
    rows = [
        {"prompt": "ab", "images": ["red.png"]},
        {"prompt": "a<image>b<image>c", "images": [{"bytes": png()}, url]},
        {"prompt": "ab"},
    ]
    before, between, without = (store(*rows, folder=tmp_path).prompt("train", n) for n in range(3))
    # A feature covers 8 x 8 pixels.
    assert before.token_ids[:8] == (whole,) * 8
    assert before.token_ids.count(whole) == 8
    assert before.model_inputs is not None
    assert before.model_inputs.tensors["image_grid_thw"].tolist() == [[1, 4, 8]]
    assert between.model_inputs is not None
    assert between.model_inputs.tensors["image_places"].tolist() == [[0, 1], [1, 6]]
    assert without.model_inputs is not None
    assert without.model_inputs.digest == ""
    assert before.row == {"prompt": "ab"}, "rewards get no images"
    assert (before.pictures[0].name, before.pictures[0].size) == ("red.png", (32, 16))
    assert before.text == "ab"


def test_parts_of_messages_are_images(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png())
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": "red.png"},
        {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": {"url": "red.png"}},
    ]
    row = {"prompt": [{"role": "user", "content": parts}]}
    prompt = store(row, folder=tmp_path, chat_template=True).prompt("train", 0)
    token = load_tokenizer(MODEL).special_tokens["<image>"]
    assert prompt.token_ids.count(token) == 8
    assert prompt.model_inputs is not None
    assert len(prompt.model_inputs.tensors["image_grid_thw"]) == 2
    assert "red.png" not in json.dumps(prompt.row)
    assert prompt.text == "ab"
    marked = {"prompt": [{"role": "user", "content": "a<image>b"}], "images": ["red.png"]}
    again = store(marked, folder=tmp_path, chat_template=True).prompt("train", 0)
    assert again.token_ids.count(token) == 4


_BAD: dict[str, tuple[Any, str]] = {
    "a missing file": (["none.png"], "image_missing"),
    "a folder": (["."], "image_missing"),
    "a device": (["/dev/zero"], "image_missing"),
    "a broken file": ([png(64, 64, "red")[:-40]], "image_invalid"),
    "no image": ([b"text"], "image_invalid"),
    "a number": ([5], "image_invalid"),
    "no base64": (["data:image/png;base64,&&"], "image_invalid"),
    "a bomb": ([bomb()], "image_too_large"),
    "a bomb of short rows": ([bomb(1, 60_000_000)], "image_too_large"),
    "a bomb of one row": ([bomb(60_000_000, 1)], "image_too_large"),
    "too many bytes": ([png() + b"0" * 5000], "image_too_large"),
    "too many": ([png()] * 3, "too_many_images"),
    "a thin one": ([png(3000, 1)], "image_invalid"),
    "a private address": (["http://127.0.0.1:9/x.png"], "image_forbidden"),
}


@pytest.mark.parametrize("name", _BAD)
def test_a_bad_image_quarantines_its_prompt_alone(name: str, tmp_path: Path) -> None:
    images, reason = _BAD[name]
    rows = [{"prompt": "ab", "images": images}, {"prompt": "ab", "images": [png()]}]
    prompt_store = store(*rows, folder=tmp_path, max_images=2, max_image_bytes=4096)
    with pytest.raises(GroupError) as caught:
        prompt_store.prompt("train", 0)
    assert (caught.value.reason, caught.value.retryable) == (reason, False)
    assert prompt_store.prompt("train", 1).pictures


@pytest.mark.parametrize(
    ("prompt", "images"), [("a<image>", []), ("a<image><image>b", [png()]), ("a<image>", [png()])]
)
def test_places_and_images_must_agree(prompt: str, images: list[bytes]) -> None:
    with pytest.raises(GroupError) as caught:
        store({"prompt": prompt, "images": images}).prompt("train", 0)
    assert caught.value.reason == "prompt_malformed"


def test_files_outside_the_installations_folders_are_forbidden(tmp_path: Path) -> None:
    inside, outside = tmp_path / "data", tmp_path / "secret.png"
    inside.mkdir()
    outside.write_bytes(png())
    (inside / "link.png").symlink_to(outside)
    (inside / "own.png").write_bytes(png())
    names = ["../secret.png", "link.png", str(outside), f"file://{outside}", "own.png"]
    prompt_store = store(
        *({"prompt": "a", "images": [name]} for name in names), folder=inside, roots=(inside,)
    )
    for number in range(4):
        with pytest.raises(GroupError) as caught:
            prompt_store.prompt("train", number)
        assert caught.value.reason == "image_forbidden"
    assert prompt_store.prompt("train", 4).pictures


@pytest.mark.parametrize("status", [200, 404])
async def test_urls_are_fetched_where_the_gate_allows_them(status: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(png())}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + png())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        row = {"prompt": "a", "images": [f"http://127.0.0.1:{port}/x.png"]}
        prompt_store = store(row, inner=("127.0.0.1",))
        if status == httpx.codes.OK:
            assert (await prompt_store.read("train", 0)).pictures[0].size == (16, 16)
        else:
            with pytest.raises(GroupError) as caught:
                await prompt_store.read("train", 0)
            assert caught.value.reason == "image_missing"


def test_large_images_are_scaled_down() -> None:
    row = {"prompt": "a", "images": [png(400, 100)]}
    inputs = store(row, max_image_pixels=64 * 64).prompt("train", 0).model_inputs
    assert inputs is not None
    assert inputs.tensors["image_grid_thw"].prod() * 16 <= 64 * 64


def test_images_for_a_model_without_are_reported_by_key() -> None:
    model = ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:ab")
    data = DataSpec(train={"source": "jsonl", "path": "x"}, answer_column=None)  # type: ignore[arg-type]
    prompt_store = PromptStore(
        data,
        {"train": [{"prompt": "a", "images": [png()]}]},
        load_tokenizer(model),  # type: ignore[dict-item]
    )
    with pytest.raises(GroupError, match=r"model\.images"):
        prompt_store.prompt("train", 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_torch_engine_decodes_images_as_the_whole_model(
    kind: str, tmp_path: Path
) -> None:
    whole = saved_model(kind, tmp_path)
    spec = model_spec(tmp_path)
    model = load_model(spec, load_tokenizer(spec), dtype=torch.float32, device="cpu")
    rng = random.Random(1)
    prompts = [random_prompt(rng, count) for count in (1, 2, 0, 1)]
    prompts = [([*tokens, 5, 6], inputs) for tokens, inputs in prompts]
    engine = TorchEngine(model, max_running=8)
    async with running(engine):
        # Each prompt is sent twice, because equal images share a prefix.
        results = await asyncio.gather(
            *(
                engine.generate(
                    request(f"{n}", tuple(tokens), max_tokens=6, seed=n, model_inputs=model_inputs)
                )
                for n, (tokens, model_inputs) in enumerate(prompts * 2)
            )
        )
        tokens, inputs = prompts[1]
        first = results[1].token_ids[:3]
        rest = await engine.generate(
            request(
                "rest",
                (*tokens, *first, IMAGE),
                max_tokens=3,
                draw_offset=4,
                model_inputs=inputs,
            )
        )
        scores = await engine.score([*tokens, *results[1].token_ids], inputs)
    assert engine.stats().cached_tokens_total >= sum(len(tokens) - 1 for tokens, _ in prompts)
    for (tokens, inputs), result in zip(prompts * 2, results, strict=True):
        expected = plain_logprobs(whole, tokens, result.token_ids, inputs)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-5, rtol=1e-5)
    assert len(rest.token_ids) == 3, "a sampled placeholder is a token like any other"
    tokens, inputs = prompts[1]
    torch.testing.assert_close(
        torch.tensor(scores[len(tokens) - 1 :]),
        torch.tensor(results[1].logprobs),
        atol=1e-5,
        rtol=1e-5,
    )


def test_the_first_rows_are_tried_with_their_images() -> None:
    spec = spec_of(model=MODEL.model_dump())
    rows = [{"prompt": "ab", "answer": "a", "images": ["none.png"]}]
    trial, _ = try_rows(spec, {"train": rows}, load_tokenizer(spec.model))  # type: ignore[dict-item]
    assert any(
        problem.startswith("data.train") and "none.png" in problem for problem in trial.problems
    )


@pytest.mark.parametrize(
    ("rollout", "key"),
    [
        ({"engine": "vllm", "quantization": "fp8"}, "rollout.quantization"),
        ({"engine": "vllm", "speculation": {"method": "ngram"}}, "rollout.speculation"),
    ],
)
def test_engines_that_are_not_compared_with_images_are_refused(
    rollout: Mapping[str, Any], key: str
) -> None:
    parts = {"model": MODEL.model_dump(), "rollout": rollout}
    spec_with(**{**parts, "rollout": {"engine": "vllm"}})
    with pytest.raises(SpecError, match=f"model.images is true and {key} is set"):
        spec_with(**parts)


class _Reader(ImageReader):
    """Reads images without a model."""

    def __init__(self, **limits: Any) -> None:
        self._data = DataSpec(train={"source": "jsonl", "path": "x"}, **limits)  # type: ignore[arg-type]

    def pixels(self, source: Any) -> Any:
        return np.asarray(self._read(source, None, "an image")).astype(int)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _inked() -> dict[str, Any]:
    """Returns images of a black square on a transparent ground."""
    ink = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    ink.paste((0, 0, 0, 255), (4, 4, 12, 12))
    palette = Image.new("P", (32, 32), 0)
    palette.putpalette([0] * 768)
    palette.paste(1, (4, 4, 12, 12))
    grey = Image.new("L", (32, 32), 7)
    grey.paste(0, (4, 4, 12, 12))
    return {
        "RGBA": encoded(ink),
        "LA": encoded(ink.convert("LA")),
        "WEBP": encoded(ink, "WEBP", lossless=True),
        "palette": encoded(palette, transparency=0),
        "one transparent level": encoded(grey, transparency=7),
        "Pillow": ink,
    }


@pytest.mark.parametrize("kind", _inked())
def test_transparent_pixels_are_white(kind: str) -> None:
    pixels = _Reader().pixels(_inked()[kind])
    assert pixels[8, 8].tolist() == [0, 0, 0]
    assert pixels[25, 25].tolist() == [255, 255, 255]


@pytest.mark.parametrize("is_file", [True, False])
def test_16_bit_grey_keeps_its_levels(is_file: bool) -> None:
    ramp = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (8, 1))
    image = Image.fromarray(ramp)
    pixels = _Reader().pixels(encoded(image) if is_file else image)
    assert pixels[0, :, 0].tolist() == (ramp[0] >> 8).tolist()
    small = Image.fromarray(np.full((4, 4), 200, np.int32))
    assert _Reader().pixels(small)[0, 0].tolist() == [200] * 3


@pytest.mark.parametrize("largest", [1.0, 255.0])
def test_fractional_grey_keeps_its_levels(largest: float) -> None:
    ramp = np.tile(np.linspace(0, largest, 64).astype(np.float32), (8, 1))
    ramp[1, 0] = np.nan
    pixels = _Reader().pixels(Image.fromarray(ramp))
    assert pixels[0, :, 0].tolist() == np.linspace(0, 255, 64).round().tolist()


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_turned_upright(kind: str, is_file: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(Image.new("RGB", (30, 10), "red"), kind, exif=exif.tobytes())
    source = content if is_file else Image.open(io.BytesIO(content))
    assert _Reader().pixels(source).shape == (30, 10, 3)


def test_a_large_image_of_a_dataset_is_refused_before_it_is_decoded() -> None:
    image = Image.open(io.BytesIO(bomb(9000, 9000)))
    with pytest.raises(GroupError) as error:
        _Reader().pixels(image)
    assert error.value.reason == "image_too_large"


def test_an_image_is_scaled_down_as_soon_as_it_is_decoded() -> None:
    reader = _Reader(max_image_pixels=100)
    first = reader._read(encoded(Image.new("RGB", (40, 20))), None, "an image")
    assert first.width * first.height <= 100
    assert first.info["size_in_data"] == (40, 20)
