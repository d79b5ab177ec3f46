"""Tests that the record of an episode has the exact tokens of each conversation."""

import json

import pytest

from services.rollout.workflows.base import Interrupted
from tests.helpers.served_episode import (
    TOKENIZER,
    Scripted,
    chat,
    client_of,
    make_episode,
    user,
)


def text(ids):
    return "".join("¶" if token == TOKENIZER.eos_id else TOKENIZER.decode([token]) for token in ids)


async def test_a_continued_chat_keeps_the_recorded_tokens():
    engine = Scripted(["four", "five"])
    episode = make_episode(engine)
    async with client_of(episode) as client:
        first = await chat(client, user("2+2"))
        answer = first["choices"][0]["message"]
        assert answer == {"role": "assistant", "content": "four"}
        await chat(client, user("2+2"), answer, user("2+3"))
    assert text(episode.prompt_ids) == "user: 2+2\nassistant: "
    assert [text(turn.token_ids) for turn in episode.response_turns] == [
        "four¶",
        "\nuser: 2+3\nassistant: ",
        "five¶",
    ]
    assert [turn.is_sampled for turn in episode.response_turns] == [True, False, True]
    assert episode.response_turns[1].version_runs == ((-1, 22),)
    assert engine.requests[1].context_ids == (
        engine.requests[0].context_ids
        + episode.response_turns[0].token_ids
        + episode.response_turns[1].token_ids
    )
    assert episode.response_text == "five"


async def test_recorded_tokens_are_kept_if_encoding_again_would_differ():
    class Odd(Scripted):
        """Fake engine that generates "ab" with a token in between that decoding drops."""

        async def generate(self, request):
            result = await super().generate(request)
            if len(self.requests) > 1:
                return result
            ids = (*TOKENIZER.encode("a"), TOKENIZER.pad_id, *TOKENIZER.encode("b"))
            return type(result)(
                token_ids=ids,
                logprobs=(-1.0, -2.0, -3.0),
                version_runs=((0, 3),),
                finish_reason="stop",
            )

    episode = make_episode(Odd(["-", "end"]))
    async with client_of(episode) as client:
        first = await chat(client, user("x"))
        assert first["choices"][0]["message"]["content"] == "ab"
        await chat(client, user("x"), first["choices"][0]["message"], user("y"))
    assert TOKENIZER.pad_id in episode.response_turns[0].token_ids
    assert episode.response_turns[0].logprobs == (-1.0, -2.0, -3.0)


async def test_another_conversation_does_not_touch_the_first():
    engine = Scripted(["one", "two", "three"])
    episode = make_episode(engine)
    async with client_of(episode) as client:
        first = await chat(client, user("main"))
        await chat(client, user("helper"))
        assert text(episode.prompt_ids) == "user: helper\nassistant: "
        await chat(client, user("main"), first["choices"][0]["message"], user("go on"))
    assert text(episode.prompt_ids) == "user: main\nassistant: "
    assert text(episode.response_ids) == "one¶\nuser: go on\nassistant: three¶"


async def test_choices_differ_in_their_seeds_and_the_one_that_is_continued_counts():
    engine = Scripted(["a", "b", "c", "d"])
    episode = make_episode(engine)
    async with client_of(episode) as client:
        both = await chat(client, user("x"), n=2)
        assert [choice["index"] for choice in both["choices"]] == [0, 1]
        await chat(client, user("x"), both["choices"][1]["message"], user("y"))
        assert text(episode.response_ids).startswith("b¶")
        await chat(client, user("x"))
    seeds = [request.seed for request in engine.requests]
    assert len({seeds[0], seeds[1], seeds[3]}) == 3


async def test_the_same_tokens_get_the_same_seed_however_they_were_asked():
    engine = Scripted(["one", "two", "three", "four"])
    async with client_of(make_episode(engine)) as client:
        first = await chat(client, user("x"))
        second = await chat(client, user("x"), first["choices"][0]["message"], user("y"))
        await chat(
            client,
            *(user("x"), first["choices"][0]["message"]),
            *(user("y"), second["choices"][0]["message"], user("z")),
        )
    first_request = engine.requests[2]
    async with client_of(make_episode(engine)) as client:
        body = {"model": "policy", "prompt": list(first_request.context_ids)}
        assert (await client.post("/completions", json=body)).status_code == 200
    assert engine.requests[3].context_ids == first_request.context_ids
    assert engine.requests[3].seed == first_request.seed


async def test_a_token_id_beyond_64_bits_is_rejected_and_the_episode_continues():
    async with client_of(make_episode(Scripted(["ok"]))) as client:
        body = {"model": "policy", "prompt": [1 << 70]}
        response = await client.post("/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        await chat(client, user("x"))


async def test_an_asked_seed_gives_the_same_draws_again():
    engine = Scripted(["a", "a", "b"])
    async with client_of(make_episode(engine)) as client:
        for seed in (7, 7, 8):
            await chat(client, user("x"), seed=seed)
    seeds = [request.seed for request in engine.requests]
    assert seeds[0] == seeds[1] != seeds[2]


async def test_a_call_that_is_nested_without_end_is_text():
    reply = '<tool_call>{"name": ' + "[" * 2000 + "}</tool_call>"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    async with client_of(make_episode(Scripted([reply]), room=5000)) as client:
        message = (await chat(client, user("add"), tools=tools))["choices"][0]["message"]
    assert message["content"] == reply


async def test_tool_calls_are_parsed_and_their_results_observed():
    call = '{"name": "add", "arguments": {"a": 1}}'
    engine = Scripted([f"let me see <tool_call>{call}</tool_call>", "done"])
    episode = make_episode(engine)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    async with client_of(episode) as client:
        first = await chat(client, user("add"), tools=tools)
        choice = first["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        tool_call = choice["message"]["tool_calls"][0]
        assert (tool_call["function"]["name"], json.loads(tool_call["function"]["arguments"])) == (
            "add",
            {"a": 1},
        )
        result = {"role": "tool", "tool_call_id": tool_call["id"], "content": "2"}
        second = await chat(client, user("add"), choice["message"], result, tools=tools)
    assert second["choices"][0]["message"]["content"] == "done"
    assert [turn.is_sampled for turn in episode.response_turns] == [True, False, True]
    assert "tool: 2" in text(episode.response_turns[1].token_ids)
    assert "<tool_call>" in text(episode.response_turns[0].token_ids)


async def test_stop_texts_end_the_reply_before_them_and_stay_in_the_record():
    episode = make_episode(Scripted(["a.b", "z"]))
    async with client_of(episode) as client:
        first = await chat(client, user("x"), stop=["."])
        assert first["choices"][0]["message"]["content"] == "a"
        assert first["choices"][0]["finish_reason"] == "stop"
        await chat(client, user("x"), first["choices"][0]["message"], user("y"))
    assert text(episode.response_ids) == "a.\nuser: y\nassistant: z¶"


async def test_completions_continue_texts_and_tokens():
    engine = Scripted(["bc", "ef", "h"])
    episode = make_episode(engine)
    async with client_of(episode) as client:

        async def complete(prompt, **more):
            body = {"model": "policy", "prompt": prompt, **more}
            return (await client.post("/completions", json=body)).json()

        first = await complete("a", max_tokens=2)
        assert first["choices"][0] == {
            "index": 0,
            "text": "bc",
            "finish_reason": "length",
            "logprobs": None,
        }
        await complete("abcd")
        assert text(engine.requests[1].context_ids) == "abcd"
        assert engine.requests[1].context_ids[:3] == (
            engine.requests[0].context_ids + episode.response_turns[0].token_ids
        )
        assert [turn.is_sampled for turn in episode.response_turns] == [True, False, True]
        so_far = [*episode.prompt_ids, *episode.response_ids]
        await complete([*so_far, *TOKENIZER.encode("g")])
    assert text(episode.response_ids) == "bcdef¶gh¶"


async def test_an_interrupted_agent_continues_inside_the_reply_without_resampling():
    async def act(client):
        first = await chat(client, user("x"))
        await chat(client, user("x"), first["choices"][0]["message"], user("y"))

    lines = ["first", "second"]
    cut = make_episode(Scripted(lines, cut=2))
    with pytest.raises(Interrupted):
        async with client_of(cut) as client:
            await act(client)
    turns = cut.recorded({})
    assert [turn.is_cut for turn in turns] == [False, False, False, True]
    rest = Scripted(["ond"])
    resumed = make_episode(rest, recorded=turns)
    assert resumed.recorded({}) == turns
    async with client_of(resumed) as client:
        await act(client)
    whole = make_episode(Scripted(lines))
    async with client_of(whole) as client:
        await act(client)
    assert resumed.response_ids == whole.response_ids
    (request,) = rest.requests
    assert request.draw_offset == 3


async def test_an_agent_with_another_request_after_an_interruption_is_sampled_again():
    cut = make_episode(Scripted(["first"], cut=1))
    with pytest.raises(Interrupted):
        async with client_of(cut) as client:
            await chat(client, user("x"))
    other = Scripted(["new"])
    episode = make_episode(other, recorded=cut.recorded({}))
    async with client_of(episode) as client:
        await chat(client, user("z"))
    assert text(episode.response_ids) == "new¶"
    assert other.requests[0].draw_offset == 0
