"""HTTP endpoint of agents: API keys, errors and streams."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from services.common.http.limits import MAX_UNAUTHENTICATED
from services.extras.agents.endpoint import Endpoint
from services.extras.agents.record import Choice
from services.extras.agents.requests import ChatRequest, CompletionRequest, Message
from services.extras.agents.streaming import VisibleText
from services.rollout.engines.base import GenerationRequest, GenerationResult, check_request
from services.rollout.workflows.base import Interrupted
from services.rollout.workflows.reply_formats import ReasoningFormat
from services.rollout.workflows.turns import observed
from tests.helpers.served_episode import (
    TOKENIZER,
    Scripted,
    chat,
    client_of,
    make_episode,
    user,
)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": 0.3}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"an_extra_of_tomorrow": 1}, "an_extra_of_tomorrow"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop": ["a<eos>"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 257}, "stop"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
async def test_unsupported_requests_get_an_error_in_openais_format(changes, param):
    async with client_of(make_episode(Scripted([]))) as client:
        body = {"model": "policy", "messages": [user("x")], **changes}
        response = await client.post("/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert next(iter(changes)) in error["message"]


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
async def test_a_token_that_the_model_lacks_is_refused(token_id: int) -> None:
    async with client_of(make_episode(Scripted(["ok"]))) as client:
        body = {"model": "policy", "prompt": [1, token_id]}
        response = await client.post("/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        assert str(token_id) in response.json()["error"]["message"]
        response = await client.post("/completions", json={"model": "policy", "prompt": [1, 2]})
        assert response.status_code == 200


async def test_neutral_values_of_unsupported_parameters_are_taken():
    async with client_of(make_episode(Scripted(["ok"]))) as client:
        await chat(client, user("x"), temperature=1.0, top_p=1.0, presence_penalty=0, seed=3)


async def test_values_that_change_nothing_and_labels_are_taken():
    neutral = {"min_tokens": 0, "ignore_eos": False, "bad_words": [], "guided_json": None}
    async with client_of(make_episode(Scripted(["ok"]))) as client:
        await chat(client, user("x"), **neutral, user="me", metadata={"a": "b"})


async def test_stop_tokens_and_stop_texts_that_are_tokens_end_a_reply():
    engine = Scripted(["ok"])
    async with client_of(make_episode(engine)) as client:
        await chat(client, user("x"), stop_token_ids=[7], stop=["<pad>", "!"])
    (request,) = engine.requests
    assert request.stop_token_ids == {7, TOKENIZER.pad_id, TOKENIZER.eos_id}
    assert request.stop_texts == ("!",)


async def test_a_greedy_evaluation_takes_the_runs_temperature_and_stays_greedy():
    engine = Scripted(["ok"])
    async with client_of(make_episode(engine, temperature=0.0)) as client:
        await chat(client, user("x"), temperature=1.0)
    assert engine.requests[0].temperature == 0.0


async def test_a_conversation_that_does_not_fit_is_rejected_and_the_sample_truncated():
    episode = make_episode(Scripted(["abc", "never"]), room=10)
    async with client_of(episode) as client:
        first = await chat(client, user("x"))
        body = {
            "model": "policy",
            "messages": [user("x"), first["choices"][0]["message"], user("long" * 10)],
        }
        response = await client.post("/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert episode.finish_reason == "length"


async def test_an_engine_that_refuses_the_context_answers_with_its_reason():
    class Refusing:
        async def generate(self, request):
            raise ValueError("the context has too many tokens")

    async with client_of(make_episode(Refusing())) as client:
        body = {"model": "policy", "messages": [user("x")]}
        response = await client.post("/chat/completions", json=body)
    assert response.status_code == 400
    assert "too many tokens" in response.json()["error"]["message"]


async def test_keys_open_their_own_episode_while_it_lasts_and_nothing_else():
    endpoint = Endpoint("http://policy/v1", temperature=1.0)
    transport = httpx.ASGITransport(endpoint.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://policy/v1") as client:
        async with endpoint.open(make_episode(Scripted(["a"]))) as access:
            good = {"Authorization": f"Bearer {access.api_key}"}
            assert (await client.get("/models")).status_code == 401
            wrong = {"Authorization": "Bearer ep-guess"}
            assert (await client.get("/models", headers=wrong)).status_code == 401
            models = (await client.get("/models", headers=good)).json()
            assert [model["id"] for model in models["data"]] == ["policy"]
            body = {"model": "gpt-x", "messages": [user("x")]}
            unknown = await client.post("/chat/completions", json=body, headers=good)
            assert unknown.status_code == 404
            assert unknown.json()["error"]["code"] == "model_not_found"
        late = await client.get("/models", headers=good)
    assert late.status_code == 401
    assert late.json()["error"]["code"] == "invalid_api_key"


async def test_other_methods_and_paths_are_rejected():
    async with client_of(make_episode(Scripted([]))) as client:
        assert (await client.get("/chat/completions")).status_code == 405
        assert (await client.post("/embeddings", json={})).status_code == 404


async def test_streams_are_server_sent_events_that_add_up_to_the_reply():
    async with client_of(make_episode(Scripted(["hi", "yo"]))) as client:
        body = {
            "model": "policy",
            "messages": [user("x")],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
        }
        response = await client.post("/chat/completions", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        assert "".join(delta["delta"].get("content") or "" for delta in deltas) == "hi"
        assert deltas[-1]["finish_reason"] == "stop"
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert [item["logprob"] for item in deltas[1]["logprobs"]["content"]] == [-0.25] * 3
        assert chunks[-1]["usage"]["completion_tokens"] == 3
        body = {"model": "policy", "prompt": "x", "stream": True, "logprobs": 0}
        text = (await client.post("/completions", json=body)).text
        first = json.loads(text.split("\n\n")[0].removeprefix("data: "))
        assert first["object"] == "text_completion"
        assert first["choices"][0]["text"] == "yo"
        assert first["choices"][0]["logprobs"]["tokens"][:2] == ["y", "o"]


class Slow:
    """Fake engine that generates a token on each release of a semaphore."""

    def __init__(self, line, *, fails_at=None):
        self.tokens = (*TOKENIZER.encode(line), TOKENIZER.eos_id)
        self.fails_at = fails_at
        self.go = asyncio.Semaphore(0)

    async def generate(self, request):
        for index, token in enumerate(self.tokens):
            await self.go.acquire()
            if index == self.fails_at:
                raise ValueError("the context has too many tokens")
            request.on_tokens((token,), (-float(index),))
        return GenerationResult(
            token_ids=self.tokens,
            logprobs=tuple(-float(index) for index in range(len(self.tokens))),
            version_runs=((0, len(self.tokens)),),
            finish_reason="stop",
        )


@asynccontextmanager
async def streamed(engine, **body):
    """Opens a stream over a socket, and yields the response, an iterator of its lines, and the episode."""
    episode = make_episode(engine)
    async with (
        Endpoint.serve("127.0.0.1:0", host="127.0.0.1", temperature=1.0) as endpoint,
        endpoint.open(episode) as access,
        httpx.AsyncClient(headers={"Authorization": f"Bearer {access.api_key}"}) as client,
        client.stream(
            "POST",
            f"{access.base_url}/chat/completions",
            json={"model": "policy", "messages": [user("x")], "stream": True, **body},
        ) as response,
    ):
        lines = (line async for line in response.aiter_lines() if line)
        yield response, lines, episode


async def test_a_stream_sends_each_token_while_the_next_one_is_not_made_yet():
    engine = Slow("hé¶")
    contents, logprobs = [], []
    engine.go.release()
    async with streamed(engine, logprobs=True) as (_, lines, episode):
        async for line in lines:
            if line == "data: [DONE]":
                break
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            if choice.get("logprobs"):
                contents.append(choice["delta"]["content"])
                logprobs += [item["logprob"] for item in choice["logprobs"]["content"]]
                engine.go.release()  # permits the next token
    assert contents == ["h", "", "é", "", "¶", ""]
    assert logprobs == [-0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert choice["finish_reason"] == "stop"
    assert episode.response_ids == engine.tokens


async def test_a_stream_that_fails_before_its_first_token_has_an_error_status():
    engine = Slow("x", fails_at=0)
    engine.go.release()
    async with streamed(engine) as (response, _, _):
        assert response.status_code == 400
        assert "too many tokens" in (await response.aread()).decode()


async def test_a_stream_that_fails_in_its_middle_ends_with_the_error():
    engine = Slow("long", fails_at=1)
    engine.go.release()
    engine.go.release()
    async with streamed(engine) as (response, lines, _):
        assert response.status_code == 200
        events = [json.loads(line.removeprefix("data: ")) async for line in lines]
    assert [event["choices"][0]["delta"]["content"] for event in events[:-1]] == ["", "l"]
    assert "too many tokens" in events[-1]["error"]["message"]


def _choice(text: str, reasoning: str | None = None) -> Choice:
    message = Message(role="assistant", content=text, reasoning_content=reasoning)
    return Choice(turn=observed([1]), message=message)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nI see.\n</think>\n\nThree.", False, "I see.", "Three."),
        ("I see.\n</think>Three.", True, "I see.", "Three."),
        ("Still thinking", True, "Still thinking", ""),
        ("Three. <think>", False, "", "Three. <think>"),
        ("<thin", False, "", "<thin"),
        ("<think></think>x <tool_call>{}", False, "", "x"),
    ],
)
def test_reasoning_is_streamed_apart(text, is_open, reasoning, content, size):
    form = ReasoningFormat(begin="<think>", end="</think>")
    visible = VisibleText(TOKENIZER, ("<tool_call>",), reasoning=form, is_open=is_open)
    pieces = [
        visible.add(TOKENIZER.encode(text[at : at + size])) for at in range(0, len(text), size)
    ]
    whole = form.split(text.partition(" <tool_call>")[0], is_open=is_open)
    pieces.append(visible.rest(_choice(whole[1], whole[0])))
    assert "".join(piece.reasoning for piece in pieces) == reasoning
    assert "".join(piece.content for piece in pieces) == content


@pytest.mark.parametrize(
    ("pieces", "marks", "contents", "rest"),
    [
        (("a", "b", "c"), (), ["a", "b", "c"], ""),
        (("a<", "b", "<st", "op>", "c"), ("<stop>",), ["a", "<b", "", "", ""], ""),
        (("say <tool", "_box"), ("<tool_call>",), ["say", " <tool_box"], ""),
        (("x <tool_call>{", "}"), ("<tool_call>",), ["x", ""], " <tool_call>{}"),
    ],
)
def test_text_that_may_become_a_marker_is_held_back(pieces, marks, contents, rest):
    text = VisibleText(TOKENIZER, marks)
    assert [text.add(TOKENIZER.encode(piece)).content for piece in pieces] == contents
    assert text.rest(_choice("".join(contents) + rest)).content == rest
    assert text.num_characters == len("".join(pieces))


async def test_calls_of_tools_come_whole_at_the_end_of_a_stream():
    line = 'sure <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "add"}}]
    async with client_of(make_episode(Scripted([line]))) as client:
        body = {"model": "policy", "messages": [user("x")], "stream": True, "tools": tools}
        text = (await client.post("/chat/completions", json=body)).text
    chunks = [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["content"] for delta in deltas) == "sure"
    (call,) = deltas[-1]["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "add")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_arguments_of_calls_keep_letters_outside_ascii():
    line = '<tool_call>{"name": "find", "arguments": {"city": "Zürich 東京"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "find"}}]
    async with client_of(make_episode(Scripted([line]))) as client:
        body = {"model": "policy", "messages": [user("x")], "tools": tools}
        answer = (await client.post("/chat/completions", json=body)).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Zürich 東京"}'


async def test_requests_of_an_ended_episode_are_given_up():
    class Stuck:
        async def generate(self, request):
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    started, ended = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks, client_of(make_episode(Stuck())) as client:
        body = {"model": "policy", "messages": [user("x")]}
        request = tasks.create_task(client.post("/chat/completions", json=body))
        await started.wait()
    assert ended.is_set()
    assert (await request).status_code == 503


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_to_an_ending_episode_gets_a_retry(is_streamed):
    body = {"model": "policy", "messages": [user("x")], "stream": is_streamed}
    answers = []
    with pytest.raises(Interrupted):
        async with client_of(make_episode(Scripted(["abcdef"], cut=1))) as client:
            task = asyncio.create_task(client.post("/chat/completions", json=body))
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                answers += [await task, await client.post("/chat/completions", json=body)]
                raise
    assert [answer.status_code for answer in answers] == [503, 503]
    assert [answer.headers["retry-after"] for answer in answers] == ["1", "1"]
    assert answers[-1].json()["error"]["code"] == "episode_ended"


async def test_real_sockets_serve_on_loopback():
    async with (
        Endpoint.serve("127.0.0.1:0", host="127.0.0.1", temperature=1.0) as endpoint,
        endpoint.open(make_episode(Scripted(["hi"]))) as access,
        httpx.AsyncClient(headers={"Authorization": f"Bearer {access.api_key}"}) as client,
    ):
        assert access.base_url.startswith("http://127.0.0.1:")
        body = {"model": access.model, "messages": [user("x")]}
        response = await client.post(f"{access.base_url}/chat/completions", json=body)
    assert response.json()["choices"][0]["message"]["content"] == "hi"


async def test_agents_that_connect_before_any_sends_its_request_are_all_served():
    async with (
        Endpoint.serve("127.0.0.1:0", host="127.0.0.1", temperature=1.0) as endpoint,
        endpoint.open(make_episode(Scripted([]))) as access,
        asyncio.timeout(60),
    ):
        port = httpx.URL(access.base_url).port
        peers = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_UNAUTHENTICATED + 1)
        ]
        for reader, writer in peers:
            writer.write(
                b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n\r\n"
                % access.api_key.encode()
            )
            assert b"200" in await reader.readline()
            writer.close()


async def test_a_request_that_cannot_fit_into_the_context_is_refused_before_it_is_read() -> None:
    engine = Scripted(["ok"])
    episode = make_episode(engine)
    body = {"model": "policy", "messages": [user("x" * (20 << 20))]}
    async with client_of(episode) as client:
        for path in ("/chat/completions", "/completions", "/messages", "/responses"):
            response = await client.post(path, json=body)
            assert response.status_code == 400
            assert "context_length_exceeded" in response.text
    assert episode.is_full
    assert not engine.requests


_CALLS = json.dumps([[]] * 200_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "user", "content": ""}] * 20_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": '\\"'}] * 20_000}]},
        {"messages": [user("x")], "tools": [{"a": {}}] * 20_000},
        {"messages": [user("x")], "stop": ["a"] * 60_000},
        {"messages": [user("x")], "stop_token_ids": [1] * 60_000},
        {"messages": [user("x")]} | {f"x{index}": None for index in range(60_000)},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": _CALLS}}]}]},
    ],
)
async def test_a_request_of_more_values_than_a_context_holds_is_refused_before_it_is_parsed(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (ChatRequest, CompletionRequest):
        monkeypatch.setattr(kind, "model_validate_json", None)
    episode = make_episode(Scripted(["ok"]))
    async with client_of(episode) as client:
        for path in ("/chat/completions", "/completions", "/messages", "/responses"):
            response = await client.post(path, json={"model": "policy"} | changes)
            assert response.status_code == 400
            assert "JSON objects" in response.text
    assert episode.is_full


async def test_brackets_and_commas_of_a_text_are_no_values() -> None:
    text = '[{"a\\": "b, c"}]' * 20_000
    async with client_of(make_episode(Scripted(["ok"]))) as client:
        response = await client.post(
            "/chat/completions", json={"model": "policy", "messages": [user(text)]}
        )
    assert "JSON objects" not in response.text
    assert "leaves no room" in response.text


@pytest.mark.parametrize("num_characters", [10, 200_000])
async def test_a_long_conversation_is_tokenized_outside_the_event_loop(
    num_characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def encode(text: str, *, continues: bool = False) -> list[int]:
        threads.append(threading.current_thread())
        return [1, 2, 3]

    episode = make_episode(Scripted(["one", "two", "three"]))
    monkeypatch.setattr(TOKENIZER, "encode", encode)
    long = user("x" * num_characters)
    async with client_of(episode) as client:
        reply = (await chat(client, long))["choices"][0]["message"]
        await chat(client, long, reply, user("next"))
        body = {"model": "policy", "prompt": long["content"]}
        assert (await client.post("/completions", json=body)).status_code == 200
    is_outside = [thread is not threading.main_thread() for thread in threads]
    assert is_outside == [num_characters > 10] * 3


@pytest.mark.parametrize("ids", [[-1, 2], [2, -1], [10**6], [2**31 - 1], [2**40], [2**70], []])
async def test_token_ids_outside_the_vocabulary_are_a_bad_request(ids: list[int]) -> None:
    engine = Checking([])
    async with client_of(make_episode(engine)) as client:
        response = await client.post("/completions", json={"model": "policy", "prompt": ids})
    assert response.status_code == 400


class Checking(Scripted):
    """Fake engine that checks its requests as all engines do."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        check_request(request, vocab_size=TOKENIZER.vocab_size, max_model_tokens=10_000)
        return await super().generate(request)
