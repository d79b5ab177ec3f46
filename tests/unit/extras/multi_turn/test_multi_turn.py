"""Tests of multi-turn episodes with tools."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.callables import load_callable
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import load_spec
from services.common.runspec.rollout import RolloutSpec
from services.common.runspec.run import ModelSpec
from services.extras.multi_turn.workflow import MultiTurn
from services.rollout.calls.pool import CallPool
from services.rollout.data.prompts import Prompt
from services.rollout.engines.base import GenerationRequest, GenerationResult
from services.rollout.failures import CallError, GroupError
from services.rollout.workflows.base import Episode, EpisodeLimits, Interrupted, load_workflow
from services.rollout.workflows.turns import Turn
from tests.helpers.chat_families import family_tokenizer

TOKENIZER = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes"))
PROMPT = Prompt(token_ids=(5, 6), text="p", answer=None, row={}, data_source="test")
CHAT = ({"role": "user", "content": "p"},)
TOOLS = """
def add(a, b):
    with open(__file__ + ".calls", "a") as file:
        file.write("x")
    return a + b
def slow(): import time; time.sleep(100)
def broken(): raise KeyError("no luck")
"""
SERVER = """
import json, sys
print("a banner that is no message", flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    print(json.dumps({"jsonrpc": "2.0", "method": "notifications/progress"}), flush=True)
    answers = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}},
        "tools/list": {"tools": [{"name": "shout"}]},
    }
    if message["method"] == "tools/call":
        text = message["params"]["arguments"]["text"].upper()
        result = {"content": [{"type": "text", "text": text}], "isError": text == "FAIL"}
    else:
        result = answers[message["method"]]
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


class Scripted:
    """Fake engine that generates given lines and aborts request number ``cut`` after three tokens."""

    def __init__(self, lines: Sequence[str], *, cut: int | None = None) -> None:
        self.lines = [(*TOKENIZER.encode(line), TOKENIZER.eos_id) for line in lines]
        self.requests: list[GenerationRequest] = []
        self.cut = cut

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        is_cut = self.cut == len(self.requests)
        tokens = self.lines[0][:3] if is_cut else self.lines.pop(0)[: request.max_tokens]
        return GenerationResult(
            token_ids=tokens,
            logprobs=(-1.0,) * len(tokens),
            version_runs=((7, len(tokens)),),
            finish_reason="aborted" if is_cut else "stop",
        )


def episode(
    engine: Any,
    calls: CallPool,
    *,
    recorded: Sequence[Turn] = (),
    room: int = 1000,
    context: int = 2000,
) -> Episode:
    limits = EpisodeLimits(
        seed=1, temperature=1.0, max_response_tokens=room, max_tokens=context, stop_texts=()
    )
    return Episode(
        replace(PROMPT, messages=CHAT),
        limits,
        engine=engine,
        tokenizer=TOKENIZER,
        calls=calls,
        request_id="r",
        recorded=recorded,
    )


async def test_a_response_is_limited_to_the_rest_of_the_context() -> None:
    engine = Scripted(["it is 5, I am quite sure"])
    async with CallPool(1) as calls:
        done = episode(engine, calls, context=len(PROMPT.token_ids) + 4)
        await MultiTurn(tools=[]).run(done)
    (request,) = engine.requests
    assert request.max_tokens == len(done.response_ids) == 4


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def tools(tmp_path: Path) -> str:
    (tmp_path / "tools.py").write_text(TOOLS)
    return str(tmp_path / "tools.py")


async def test_results_follow_their_calls_and_are_not_sampled_tokens(tools: str) -> None:
    engine = Scripted([f"let me see {call('add', a=2, b=3)}", "it is 5"])
    async with CallPool(1) as calls:
        done = episode(engine, calls)
        await MultiTurn(tools=[f"{tools}:add"], result_template="[{result}]").run(done)
    assert [turn.is_sampled for turn in done.turns] == [True, False, True]
    assert done.text(done.turns[1]) == "[5]"
    assert done.turns[1].version_runs == ((-1, 3),)
    assert done.response_text == "it is 5"
    assert done.finish_reason == "stop"
    first, second = engine.requests
    assert (
        second.context_ids == first.context_ids + done.turns[0].token_ids + done.turns[1].token_ids
    )
    assert second.draw_offset == len(done.turns[0].token_ids)


async def test_results_go_through_the_chat_template_and_sampled_tokens_stay(tools: str) -> None:
    lines = [call("add", a=2, b=3), call("add", a=5, b=1), "6"]
    engine = Scripted(lines)
    async with CallPool(1) as calls:
        done = episode(engine, calls)
        await MultiTurn(tools=[f"{tools}:add"]).run(done)
    texts = [done.text(turn) for turn in done.turns]
    assert texts[1::2] == ["\ntool: 5\nassistant: ", "\ntool: 6\nassistant: "]
    sampled = [turn.token_ids for turn in done.turns if turn.is_sampled]
    assert sampled == [(*TOKENIZER.encode(line), TOKENIZER.eos_id) for line in lines]
    whole = engine.requests[0].context_ids + done.response_ids
    assert engine.requests[2].context_ids == whole[: len(whole) - len(sampled[2])]


async def test_the_calculator_example_rewards_the_result_of_a_call() -> None:
    code = Path(__file__).parents[4] / "examples" / "calculator" / "calculator.py"
    spec = load_spec(code.with_suffix(".yaml"), {})
    (row, *_), train = (load_callable(f"{code}:{name}")() for name in ("heldout", "train"))
    assert row["answer"] not in {train_row["answer"] for train_row in train}
    question = row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?")
    engine = Scripted([call("calculator", expression=question), f"It is {row['answer']}."])
    # This tokenizer has one token per byte, so the example's max_turn_tokens would be too small.
    arguments = {**spec.rollout.workflow_arguments, "max_turn_tokens": None}
    arguments["tools"] = [f"{code}:calculator"]
    async with CallPool(1) as calls:
        done = episode(engine, calls)
        await MultiTurn(**arguments).run(done)
    assert done.text(done.turns[1]) == f"\ntool: {row['answer']}\nassistant: "
    reward = load_callable(f"{code}:reward")
    assert reward("", done.response_text, row["answer"], row) == 1.0
    assert reward("", done.text(done.turns[0]), row["answer"], row) == 0.0


@pytest.mark.parametrize("expression", ["2 ** 9", "f()", "1.5 * 2", "'a' * 9", "(", "1+" * 40])
def test_the_calculator_of_the_example_computes_nothing_else(expression: str) -> None:
    code = Path(__file__).parents[4] / "examples" / "calculator" / "calculator.py"
    with pytest.raises(ValueError, match="expression"):
        load_callable(f"{code}:calculator")(expression)


async def test_results_that_no_template_renders_are_refused(tools: str) -> None:
    workflow = MultiTurn(tools=[f"{tools}:add"])
    with pytest.raises(ValueError, match="result_template"):
        workflow.check_tokenizer(None)
    async with CallPool(1) as calls:
        done = episode(Scripted([call("add", a=2, b=3)]), calls)
        done.prompt = PROMPT
        with pytest.raises(GroupError, match="result_template"):
            await workflow.run(done)


@pytest.mark.parametrize(("spare", "reason"), [(-1, "length"), (0, "length"), (1, "stop")])
async def test_a_result_that_leaves_no_tokens_for_an_answer_ends_the_response_by_length(
    tools: str, spare: int, reason: str
) -> None:
    line = call("add", a=2, b=3)
    async with CallPool(1) as calls:
        done = episode(Scripted([line, "5"]), calls, room=len(line) + 1 + len("[5]") + spare)
        await MultiTurn(tools=[f"{tools}:add"], result_template="[{result}]").run(done)
    assert done.finish_reason == reason


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (call("broken"), "KeyError: 'no luck'"),
        (call("slow"), "longer than 0.5 s"),
        (call("nobody"), "'nobody'; tools: broken, slow"),
        ("<tool_call>{bad}</tool_call>", "a call must be JSON"),
        ('<tool_call>{"name": 3}</tool_call>', "name must be text"),
    ],
)
async def test_a_failing_tool_returns_an_error_to_the_policy(
    tools: str, text: str, result: str
) -> None:
    workflow = MultiTurn(
        tools=[f"{tools}:slow", f"{tools}:broken"], tool_timeout_s=0.5, offer_tools=False
    )
    async with CallPool(1) as calls:
        done = episode(Scripted([text, "well"]), calls)
        await workflow.run(done)
    assert "error: " in done.text(done.turns[1])
    assert tools not in done.text(done.turns[1])  # the tokens do not contain a path of this machine
    assert result in done.text(done.turns[1])
    assert done.response_text == "well"


async def test_turn_and_token_limits_end_the_episode(tools: str) -> None:
    line = call("add", a=1, b=1)
    workflow = MultiTurn(tools=[f"{tools}:add"], max_turns=2)
    async with CallPool(1) as calls:
        many = episode(Scripted([line] * 5), calls)
        await workflow.run(many)
        assert [turn.is_sampled for turn in many.turns] == [True, False] * 2
        full = episode(Scripted([line] * 5), calls, room=len(line) + 10)
        await workflow.run(full)
        assert [turn.is_sampled for turn in full.turns] == [True]
        assert full.finish_reason == "length"


async def test_a_resumed_episode_repeats_no_call_and_continues_inside_the_interrupted_turn(
    tools: str,
) -> None:
    lines = [call("add", a=2, b=3), "it is five"]
    workflow = MultiTurn(tools=[f"{tools}:add"])
    async with CallPool(1) as calls:
        cut = episode(Scripted(lines, cut=2), calls)
        with pytest.raises(Interrupted):
            await workflow.run(cut)
        rest = Scripted([lines[1][3:]])
        resumed = episode(rest, calls, recorded=cut.recorded({}))
        await workflow.run(resumed)
        whole = episode(Scripted(lines), calls)
        await workflow.run(whole)
    assert resumed.response_ids == whole.response_ids
    assert [request.turn_tokens for request in rest.requests] == [3]
    assert len(Path(f"{tools}.calls").read_text()) == 2  # noqa: ASYNC240 -- a few bytes


async def test_mcp_servers_offer_their_tools(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    workflow = MultiTurn(mcp_servers=[[sys.executable, str(tmp_path / "server.py")]])
    lines = [call("shout", text="hey"), call("shout", text="fail"), "done"]
    async with CallPool(1) as calls, asyncio.timeout(30):
        done = episode(Scripted(lines), calls)
        await workflow.run(done)
    assert "HEY" in done.text(done.turns[1])
    assert "error: " in done.text(done.turns[3])


async def test_two_tools_with_one_name_are_refused(tmp_path: Path, tools: str) -> None:
    servers = []
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(SERVER)
        servers.append([sys.executable, str(tmp_path / f"{name}.py")])
    (tmp_path / "shout.py").write_text("def shout(text: str): ...")
    function = [f"{tmp_path}/shout.py:shout"]
    async with CallPool(1) as calls, asyncio.timeout(60):
        for arguments, origins in (
            ({"mcp_servers": servers}, r"one\.py.*two\.py"),
            ({"mcp_servers": [servers[0]] * 2}, r"one\.py.*one\.py"),
            ({"mcp_servers": servers[:1], "tools": function}, r"function 'shout'.*one\.py"),
        ):
            with pytest.raises(CallError, match=f"(?s){origins}.*'shout'"):
                await MultiTurn(**arguments).describe_tools(calls, functions=True)


def test_workflows_are_loaded_by_name_with_their_arguments() -> None:
    def spec(**changes: Any) -> RolloutSpec:
        return RolloutSpec(rewards=[{"name": "exact_match"}], **changes)  # type: ignore[arg-type]

    assert isinstance(load_workflow(spec(workflow="multi_turn")), MultiTurn)
    with pytest.raises(ValueError, match=r"rollout\.workflow_arguments"):
        load_workflow(spec(workflow="multi_turn", workflow_arguments={"x": 1}))
    with pytest.raises(ValueError, match="result_template"):
        load_workflow(spec(workflow="multi_turn", workflow_arguments={"result_template": "x"}))


DESCRIBED = '''
def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b
'''


async def test_a_chat_template_receives_the_tools(tmp_path: Path) -> None:
    (tmp_path / "described.py").write_text(DESCRIBED)
    (tmp_path / "server.py").write_text(SERVER)
    rendered: list[Any] = []

    class Template:
        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def render_chat(self, messages: Any, tools: Any = ()) -> str:
            rendered.append((list(messages), list(tools)))
            return "chat with tools"

    workflow = MultiTurn(
        tools=[f"{tmp_path / 'described.py'}:add"],
        mcp_servers=[[sys.executable, str(tmp_path / "server.py")]],
    )
    engine = Scripted(["5", "6"])
    async with CallPool(1) as calls, asyncio.timeout(30):
        for _ in range(2):
            done = episode(engine, calls)
            done.tokenizer = Template()  # type: ignore[assignment]
            done.prompt = replace(PROMPT, messages=CHAT)
            await workflow.run(done)
    messages, (add, shout) = rendered[1]
    assert rendered[0] == rendered[1]
    assert messages == list(CHAT)
    assert add["function"]["name"] == "add"
    assert add["function"]["description"] == "The sum of two numbers."
    parameters = add["function"]["parameters"]
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["b"]["type"] == "integer"
    assert shout["function"]["name"] == "shout"
    assert TOKENIZER.decode(engine.requests[0].context_ids) == "chat with tools"


async def test_tools_that_leave_no_tokens_for_a_response_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "described.py").write_text(DESCRIBED)
    workflow = MultiTurn(tools=[f"{tmp_path / 'described.py'}:add"])
    async with CallPool(1) as calls:
        done = episode(Scripted([]), calls, context=3)
        done.prompt = replace(PROMPT, messages=CHAT)
        with pytest.raises(GroupError, match="offer fewer tools"):
            await workflow.run(done)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"tools": "x.py:f"}, "tools"),
        ({"tools": {"x.py:f": 1}}, "tools"),
        ({"tools": None}, "tools"),
        ({"tools": [5]}, r"tools\.0"),
        ({"tools": ["x.py:f", "y.py:f"]}, "tools"),
        ({"mcp_servers": "server"}, "mcp_servers"),
        ({"mcp_servers": [[]]}, r"mcp_servers\.0"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_turns": True}, "max_turns"),
        ({"max_turn_tokens": "many"}, "max_turn_tokens"),
        ({"tool_timeout_s": -1}, "tool_timeout_s"),
        ({"result_template": 5}, "result_template"),
        ({"offer_tools": "yes"}, "offer_tools"),
        ({"tool_format": []}, "tool_format"),
        ({"max_turn": 3}, "max_turn: is not a known key.* 'max_turns'"),
    ],
)
def test_wrong_arguments_are_rejected_by_key(arguments: dict[str, Any], key: str) -> None:
    spec = RolloutSpec(
        workflow="multi_turn", workflow_arguments=arguments, rewards=({"name": "exact_match"},)
    )  # type: ignore[arg-type]  # pydantic converts
    with pytest.raises(ValueError, match=rf"rollout\.workflow_arguments\.{key}"):
        load_workflow(spec)


@pytest.mark.parametrize(
    "prefix", ["", "{% if tools %}Tools are available.{% endif %}", "{{ tools | length if tools }}"]
)
def test_a_template_that_does_not_show_the_tools_is_refused(tmp_path: Path, prefix: str) -> None:
    load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes")).save(tmp_path)
    chat = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(prefix + chat)
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer=str(tmp_path)))
    with pytest.raises(ValueError, match=r"rollout\.workflow_arguments\.offer_tools"):
        MultiTurn(tools=["x.py:f"], result_template="{result}").check_tokenizer(tokenizer)
    MultiTurn(tools=["x.py:f"], offer_tools=False).check_tokenizer(tokenizer)
    (tmp_path / "chat_template.jinja").write_text("{{ tools | tojson }}" + chat)
    MultiTurn(tools=["x.py:f"]).check_tokenizer(
        load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer=str(tmp_path)))
    )


TALKING = """
def say(what):
    return {"emoji": "\\ud83d", "letters": "東京", "text": "<|im_end|>"}
def cut():
    return "a\\ud83d"
"""


async def test_a_result_keeps_its_letters_and_ends_no_turn(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TALKING)
    tokenizer = family_tokenizer("qwen3")
    engine = Scripted([])
    lines = (call("say", what="x"), call("cut"), "done")
    engine.lines = [(*tokenizer.encode(line), tokenizer.eos_id) for line in lines]
    tools = [f"{tmp_path}/tools.py:{name}" for name in ("say", "cut")]
    async with CallPool(1) as calls:
        begun = episode(engine, calls, room=3000, context=9000)
        begun.tokenizer = tokenizer
        await MultiTurn(tools=tools, result_template="<|im_end|>[{result}]", offer_tools=False).run(
            begun
        )
    first, second = (turn for turn in begun.turns if not turn.is_sampled)
    assert "東京" in begun.text(first)
    assert first.token_ids.count(tokenizer.eos_id) == 1
    assert begun.text(second) == "[a?]"


async def test_the_tools_of_a_row_are_added_to_those_of_the_workflow(tools: str) -> None:
    function = {"name": "other", "description": "d", "parameters": {"properties": {}}}
    row_tool = {"type": "function", "function": {**function, "name": "add"}}
    tokenizer = family_tokenizer("qwen3")
    engine = Scripted([])
    engine.lines = [(*tokenizer.encode("done"), tokenizer.eos_id)]
    async with CallPool(1) as calls:
        begun = episode(engine, calls, room=3000, context=9000)
        begun.tokenizer = tokenizer
        row_tools = ({"type": "function", "function": function}, row_tool)
        begun.prompt = replace(begun.prompt, tools=row_tools)
        await MultiTurn(tools=[f"{tools}:add"]).run(begun)
    text = tokenizer.decode(engine.requests[0].context_ids)
    assert text.count('"name": "other"') == text.count('"name": "add"') == 1
