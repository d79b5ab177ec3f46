"""Images in agents' messages and tool results: tokens, positions, conversations and errors."""

import base64
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.run import ModelSpec
from services.common.security.confinement import CodePolicy
from services.extras.multi_turn.workflow import MultiTurn
from services.rollout.calls.outside import AddressPolicy
from services.rollout.calls.pool import CallPool
from services.rollout.data.images import ImageReader
from services.rollout.data.prompts import PromptStore
from services.rollout.failures import CallError
from services.rollout.workflows.base import Episode, EpisodeLimits
from services.rollout.workflows.turns import Turn
from services.wire.data.model_inputs import ModelInputs
from tests.helpers.served_episode import Scripted, chat, client_of, make_episode

MODEL = ModelSpec(path="tiny:qwen2_5_vl-0.6m", tokenizer="bytes", images=True)
TOKENIZER = load_tokenizer(MODEL)
(PLACEHOLDER,) = TOKENIZER.encode("<image>")


def url(color: str = "red", *, side: int = 16) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), color).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def data_spec(**changes: Any) -> DataSpec:
    train = {"source": "jsonl", "path": "x"}
    return DataSpec(train=train, answer_column=None, chat_template=True, **changes)  # type: ignore[arg-type]


def reader(**changes: Any) -> ImageReader:
    return ImageReader(
        MODEL, data_spec(**changes), TOKENIZER, allowance=CodePolicy(), reach=AddressPolicy()
    )


def seeing(engine: Scripted, *, recorded: Sequence[Turn] = (), **changes: Any) -> Episode:
    episode = make_episode(engine, recorded=recorded)
    episode.tokenizer, episode.images = TOKENIZER, reader(**changes)
    return episode


def expanded(text: str, *, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tokens of a text with one placeholder for each feature of an image."""
    first, *others = text.split("<image>")
    tokens = TOKENIZER.encode(first)
    for count, rest in zip(counts, others, strict=True):
        tokens += [PLACEHOLDER] * count + TOKENIZER.encode(rest)
    return tuple(tokens)


def check_places(context_ids: tuple[int, ...], inputs: ModelInputs | None, count: int) -> None:
    """Checks that the placeholders of a request are exactly those of its images, in order."""
    assert inputs is not None
    places = inputs.tensors["image_places"].tolist()
    assert [number for number, _ in places] == list(range(count))
    sizes = (inputs.tensors["image_grid_thw"].prod(1) // 4).tolist()
    covered = [
        first + k for (_, first), size in zip(places, sizes, strict=True) for k in range(size)
    ]
    assert covered == [n for n, token in enumerate(context_ids) if token == PLACEHOLDER]
    assert len(inputs.tensors["pixel_values"]) == int(
        inputs.tensors["image_grid_thw"].prod(1).sum()
    )


def part(source: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


async def test_images_of_a_chat_are_where_its_template_shows_them() -> None:
    engine = Scripted(["a", "b"])
    episode = seeing(engine)
    async with client_of(episode) as client:
        question = {"role": "user", "content": [text("see "), part(url()), text("?")]}
        reply = (await chat(client, question))["choices"][0]["message"]
        again = {"role": "user", "content": [part(url("blue", side=32)), text("and this?")]}
        await chat(client, question, reply, again)
    first, second = engine.requests
    assert first.context_ids == expanded("user: see <image>?\nassistant: ", counts=(4,))
    whole = "user: see <image>?\nassistant: a<eos>\nuser: <image>and this?\nassistant: "
    assert second.context_ids == expanded(whole, counts=(4, 16))
    check_places(first.context_ids, first.model_inputs, 1)
    check_places(second.context_ids, second.model_inputs, 2)
    assert [len(turn.pictures) for turn in episode.turns] == [1, 0, 1, 0]
    assert len(episode.conversations) == 1


async def test_another_image_in_the_history_is_another_conversation() -> None:
    engine = Scripted(["a", "b", "c"])
    episode = seeing(engine)
    async with client_of(episode) as client:
        for color in ("red", "blue", "red"):
            question = {"role": "user", "content": [part(url(color)), text("?")]}
            await chat(client, question)
    assert len({request.context_ids for request in engine.requests}) == 1
    assert len({request.model_inputs for request in engine.requests}) == 2
    seeds = [request.seed for request in engine.requests]
    assert len(set(seeds)) == 3
    again = seeing(Scripted(["b"]))
    async with client_of(again) as client:
        question = {"role": "user", "content": [part(url("blue")), text("?")]}
        await chat(client, question)
    assert again.turns[0] != episode.conversations[0][0]
    assert again.turns[0] == episode.conversations[1][0]


async def test_a_resumed_agent_gets_the_replies_to_its_images_only() -> None:
    engine = Scripted(["a", "b"])
    first = seeing(engine)
    questions = [
        {"role": "user", "content": [part(url(reply)), text("?")]} for reply in ("red", "blue")
    ]
    async with client_of(first) as client:
        for message in questions:
            await chat(client, message)
    resumed = seeing(Scripted(["c"]), recorded=first.recorded({}))
    green = {"role": "user", "content": [part(url("green")), text("?")]}
    async with client_of(resumed) as client:
        replies = [await chat(client, reply) for reply in (questions[1], green, questions[0])]
    said = [reply["choices"][0]["message"]["content"] for reply in replies]
    assert said == ["b", "c", "a"]


@pytest.mark.parametrize("protocol", ["messages", "responses"])
async def test_other_protocols_take_images_of_users_and_tools(protocol: str) -> None:
    engine = Scripted(["a"])
    data = url().partition(",")[2]
    if protocol == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": data}
        image = {"type": "image", "source": source}
        body: dict[str, Any] = {
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": [text("x"), image, text("y")]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [image, text("z")]}
                    ],
                },
            ],
        }
    else:
        image = {"type": "input_image", "image_url": url()}
        body = {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "x"},
                        image,
                        {"type": "input_text", "text": "y"},
                    ],
                },
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "1",
                    "output": [image, {"type": "input_text", "text": "z"}],
                },
            ],
        }
    async with client_of(seeing(engine)) as client:
        response = await client.post(f"/{protocol}", json={"model": "policy", **body})
        assert response.status_code == 200, response.text
        if protocol == "messages":
            counted = await client.post("/messages/count_tokens", json={"model": "policy", **body})
            assert counted.json()["input_tokens"] == len(engine.requests[0].context_ids)
    (request,) = engine.requests
    expected = "user: x<image>y\nassistant: \ntool: <image>z\nassistant: "
    assert request.context_ids == expanded(expected, counts=(4, 4))
    check_places(request.context_ids, request.model_inputs, 2)


@pytest.mark.parametrize(
    ("images", "changes", "reason"),
    [
        (["data:image/png;base64,AAAA"], {}, "image_invalid"),
        (["/etc/passwd"], {}, "image_forbidden"),
        (["http://127.0.0.1:9/x.png"], {}, "image_forbidden"),
        ([url(side=64)], {"max_image_bytes": 50}, "image_too_large"),
        ([url(), url()], {"max_images": 1}, "too_many_images"),
    ],
)
async def test_a_bad_image_is_refused_and_the_episode_goes_on(
    images: list[str], changes: dict[str, Any], reason: str
) -> None:
    episode = seeing(Scripted(["a", "b"]), **changes)
    async with client_of(episode) as client:
        hello = {"role": "user", "content": "x"}
        said = (await chat(client, hello))["choices"][0]["message"]
        question = {"role": "user", "content": [*map(part, images), text("?")]}
        body = {"model": "policy", "messages": [hello, said, question]}
        response = await client.post("/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_image"
        assert reason in response.json()["error"]["message"]
        await chat(client, hello, said, {"role": "user", "content": "y"})
    assert len(episode.conversations) == 1


async def test_images_of_all_turns_count() -> None:
    async with client_of(seeing(Scripted(["a", "b"]), max_images=1)) as client:
        question = {"role": "user", "content": [part(url()), text("?")]}
        reply = (await chat(client, question))["choices"][0]["message"]
        body = {"model": "policy", "messages": [question, reply, question]}
        response = await client.post("/chat/completions", json=body)
    assert "data.max_images" in response.json()["error"]["message"]


async def test_a_model_without_images_refuses_them_by_key() -> None:
    async with client_of(make_episode(Scripted([]))) as client:
        body = {"model": "policy", "messages": [{"role": "user", "content": [part(url())]}]}
        response = await client.post("/chat/completions", json=body)
    assert response.status_code == 400
    assert "model.images" in response.json()["error"]["message"]


TOOLS = """
from PIL import Image
def look():
    image = {"type": "image", "image": Image.new("RGB", (16, 16), "red")}
    return [{"type": "text", "text": "see "}, image, {"type": "text", "text": "!"}]
def broken():
    return [{"type": "image", "image": "data:image/png;base64,AAAA"}]
"""
SERVER = """
import base64, io, json, sys
from PIL import Image
buffer = io.BytesIO()
Image.new("RGB", (16, 16), "red").save(buffer, "PNG")
parts = [
    {"type": "text", "text": "see "},
    {"type": "image", "mimeType": "image/png", "data": base64.b64encode(buffer.getvalue()).decode()},
    {"type": "text", "text": "!"},
]
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    result = {"initialize": {"capabilities": {}}, "tools/list": {"tools": [{"name": "look"}]}}.get(
        message["method"], {"content": parts, "isError": False}
    )
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def called(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


async def with_tools(engine: Scripted, calls: CallPool, **tools: Any) -> Episode:
    """Runs an episode with tools and an image in its prompt."""
    rows = [{"prompt": [{"role": "user", "content": [part(url(side=32)), text("p")]}]}]
    prompts = PromptStore(data_spec(), {"train": rows}, TOKENIZER, images=reader())  # type: ignore[dict-item]
    limits = EpisodeLimits(
        seed=1, temperature=1.0, max_response_tokens=1000, max_tokens=2000, stop_texts=()
    )
    episode = Episode(
        prompts.prompt("train", 0),
        limits,
        engine=engine,  # type: ignore[arg-type]
        tokenizer=TOKENIZER,
        calls=calls,
        request_id="r",
    )
    episode.images = reader()
    await MultiTurn(**tools).run(episode)
    return episode


@pytest.mark.parametrize("kind", ["function", "server"])
async def test_results_of_tools_may_have_images(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "server.py").write_text(SERVER)
    tools: dict[str, Any] = {"tools": [f"{tmp_path}/tools.py:look"]}
    if kind == "server":
        tools = {"mcp_servers": [[sys.executable, str(tmp_path / "server.py")]]}
    engine = Scripted([called("look"), called("look"), "red"])
    async with CallPool(1) as calls:
        episode = await with_tools(engine, calls, **tools)
    first, second, third = engine.requests
    assert first.context_ids == expanded("user: <image>p\nassistant: ", counts=(16,))
    result = "<eos>\ntool: see <image>!\nassistant: "
    begun = f"user: <image>p\nassistant: {called('look')}{result}"
    assert second.context_ids == expanded(begun, counts=(16, 4))
    assert third.context_ids == expanded(f"{begun}{called('look')}{result}", counts=(16, 4, 4))
    for number, request in enumerate(engine.requests):
        check_places(request.context_ids, request.model_inputs, number + 1)
    assert [len(turn.pictures) for turn in episode.turns] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("template", [None, "[{result}]"])
async def test_a_bad_image_of_a_tool_fails_the_sample(template: str | None, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    name = "broken" if template is None else "look"
    async with CallPool(1) as calls:
        with pytest.raises(CallError) as caught:
            await with_tools(
                Scripted([called(name)]),
                calls,
                tools=[f"{tmp_path}/tools.py:{name}"],
                result_template=template,
            )
    assert caught.value.kind == "invalid_image"
