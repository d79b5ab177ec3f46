"""Tests of tool results rendered with chat templates in the styles of public models."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from services.common.models.made_tokenizers import EOS, PAD, make_builtin_tokenizer
from services.common.models.tokenizer import Tokenizer
from services.extras.multi_turn.templates import (
    ToolCallAndResult,
    ToolRound,
    check_tool_results,
    tool_result_ids,
)
from services.rollout.workflows.chat_turns import following_ids, kept_marks, plain_role_marks
from tests.helpers.chat_families import FAMILIES, Family, family_tokenizer

CHATML = """\
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""
"""Qwen 2.5: results of a turn are together in a user's turn."""

THINKING = CHATML.replace(
    """{%- else %}
{{- "<|im_start|>" + """,
    """{%- elif message.role == "assistant" and loop.last %}
{{- "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n" + message.content + "<|im_end|>\\n" }}
{%- else %}
{{- "<|im_start|>" + """,
)
"""Qwen 3: the last reply is rendered in another way than the same one before others."""

LLAMA = """\
{{- bos_token if bos_token else "" }}
{%- for message in messages %}
{%- if message.tool_calls is defined and message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}
{%- endif %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{{- message.tool_calls[0].function.name + "<|eot_id|>" }}
{%- elif message.role in ("tool", "ipython") %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + (message.content | tojson) + "<|eot_id|>" }}
{%- else %}
{{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}"""

MISTRAL = """\
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
{%- if message.role != "tool" and not message.tool_calls %}
{%- if (message.role == "user") != (ns.index % 2 == 0) %}
{{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == "user" %}{{- "[INST] " + message.content + "[/INST]" }}
{%- elif message.tool_calls %}
{{- "[TOOL_CALLS] [" }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception("Tool call IDs should be 9 characters!") }}{%- endif %}
{{- ", " if not loop.first else "" }}{{- call.function | tojson }}
{%- endfor %}
{{- "]</s>" }}
{%- elif message.role == "assistant" %}{{- " " + message.content + "</s>" }}
{%- elif message.role == "tool" %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + "}[/TOOL_RESULTS]" }}
{%- endif %}
{%- endfor %}"""

GEMMA = """\
{%- for message in messages %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
{%- endif %}
{{- "<s>" + message.role + message.content + "<e>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<s>model" }}{%- endif %}"""

SILENT = """\
{%- for message in messages if message.role in ("user", "assistant") %}
{{- "<s>" + message.role + message.content + "<e>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<s>assistant" }}{%- endif %}"""

UNOPENED = CHATML.replace(
    "{%- if add_generation_prompt %}",
    '{%- if add_generation_prompt and messages[-1].role == "user" %}',
)
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>", "<s>", "<e>",
)  # fmt: skip


def made(template: str, *, ends: Sequence[str]) -> Tokenizer:
    """Returns a byte tokenizer with a chat template and the special tokens that end a turn."""
    inner = PreTrainedTokenizerFast(
        tokenizer_object=make_builtin_tokenizer("bytes"),
        pad_token=PAD,
        eos_token=EOS,
        unk_token=PAD,
    )
    inner.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token) for token in SPECIAL]}
    )
    inner.eos_token = ends[0]
    inner.chat_template = template
    return Tokenizer(
        inner, name="made", stop_ids=[inner.convert_tokens_to_ids(token) for token in ends]
    )


USER: dict[str, Any] = {"role": "user", "content": "2 + 3?"}


def rounds(*results: Sequence[str]) -> list[ToolRound]:
    calls = [
        tuple(ToolCallAndResult(name="add", result=text) for text in result) for result in results
    ]
    return [ToolRound(reply="<tool_call>{}</tool_call>", calls=result) for result in calls]


QWEN_OPEN = "<|im_start|>assistant\n"
QWEN_RESULTS = (
    "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>"
    "\n<tool_response>\n6\n</tool_response><|im_end|>\n"
)
LLAMA_OPEN = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_RESULT = "<|start_header_id|>ipython<|end_header_id|>\n\n"
STYLES = {
    "qwen 2.5": (CHATML, ["<|im_end|>"], QWEN_RESULTS + QWEN_OPEN),
    "qwen 3": (THINKING, ["<|im_end|>"], QWEN_RESULTS + QWEN_OPEN),
    "llama 3": (
        LLAMA,
        ["<|eot_id|>", "<|eom_id|>"],
        f'{LLAMA_RESULT}"5"<|eot_id|>{LLAMA_RESULT}"6"<|eot_id|>{LLAMA_OPEN}',
    ),
    "mistral": (
        MISTRAL,
        ["</s>"],
        '[TOOL_RESULTS] {"content": 5}[/TOOL_RESULTS][TOOL_RESULTS] {"content": 6}[/TOOL_RESULTS]',
    ),
}


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize(("template", "ends", "expected"), STYLES.values(), ids=STYLES)
def test_results_are_rendered_and_the_next_turn_opened_as_the_template_does(
    template: str, ends: list[str], expected: str, num_before: int
) -> None:
    tokenizer = made(template, ends=ends)
    check_tool_results(tokenizer)
    chat = rounds(*[["1"]] * num_before, ["5", "6"])
    for end in ends:
        (end_id,) = tokenizer.encode(end)
        ids = tool_result_ids(tokenizer, [USER], chat, last_id=end_id)
        assert ids == tokenizer.encode(expected)
    # A reply that was ended by a limit or a stop text gets an end token first.
    ids = tool_result_ids(tokenizer, [USER], chat, last_id=tokenizer.encode("x")[0])
    assert ids == tokenizer.encode(ends[0] + expected)


@pytest.mark.parametrize(
    ("template", "lack"),
    [(GEMMA, "alternate"), (SILENT, "'tool'"), (UNOPENED, "assistant")],
)
def test_a_template_that_cannot_render_results_is_rejected(template: str, lack: str) -> None:
    with pytest.raises(ValueError, match=lack):
        check_tool_results(made(template, ends=["<e>"]))


ROUND = [ToolRound(reply="c", calls=(ToolCallAndResult(name="f", result="three"),))]
ASK = [{"role": "user", "content": "how many"}]


@pytest.mark.parametrize("last", ["<|observation|>", "<|user|>", "<|endoftext|>", None])
def test_the_next_message_keeps_its_role_whatever_token_ended_a_reply_without_its_own_end(
    last: str | None,
) -> None:
    tokenizer = family_tokenizer("glm4")
    last_id = None if last is None else tokenizer.vocabulary[last]
    after = (last or "") + tokenizer.decode(
        tool_result_ids(tokenizer, ASK, ROUND, last_id=last_id), keeps_special=True
    )
    assert after.count("<|observation|>") == 1
    assert "<|observation|>\n<tool_response>\nthree" in after
    chat = [*ASK, {"role": "assistant", "content": "MARK"}, {"role": "user", "content": "and now"}]
    after = (last or "") + tokenizer.decode(
        following_ids(tokenizer, [chat], mark="MARK", last_id=last_id), keeps_special=True
    )
    assert after.count("<|user|>") == 1
    assert "<|user|>\nand now" in after


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"glm4", "chatglm3", "nemotron"}))
def test_a_reply_that_ended_by_itself_gets_no_second_end_token(name: str) -> None:
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    chat = [*ASK, {"role": "assistant", "content": "MARK"}, {"role": "user", "content": "and now"}]
    unended = following_ids(tokenizer, [chat], mark="MARK", last_id=None)
    assert unended[0] == tokenizer.closing_id
    for token in (family.eos, *family.stops):
        last_id = tokenizer.vocabulary[token]
        assert following_ids(tokenizer, [chat], mark="MARK", last_id=last_id) == unended[1:]


@pytest.mark.parametrize("last", ["<|observation|>", "<|user|>", "<|endoftext|>", None])
def test_the_next_message_keeps_its_role_if_a_template_writes_it_after_each_reply(
    last: str | None,
) -> None:
    """GLM's templates for training write the user's token with the reply, also after the last one."""
    template = (
        "[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}{% if loop.first %}<|user|>{% endif %}"
        "{{ '\\n' + m.content }}{% else %}<|assistant|>{{ '\\n' + m.content }}<|user|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = family_tokenizer("glm4", template=template)
    last_id = None if last is None else tokenizer.vocabulary[last]
    chat = [*ASK, {"role": "assistant", "content": "MARK"}, {"role": "user", "content": "and now"}]
    after = (last or "") + tokenizer.decode(
        following_ids(tokenizer, [chat], mark="MARK", last_id=last_id), keeps_special=True
    )
    assert after.count("<|user|>") == 1
    assert "<|user|>\nand now" in after


@pytest.mark.parametrize("last", ["<end_of_turn>", "<eos>"])
def test_a_reply_that_ended_with_the_second_of_two_end_tokens_gets_neither_again(last: str) -> None:
    """Cohere's template ends a reply with the end of the response and the end of the turn."""
    template = (
        "{% for m in messages %}<start_of_turn>{{ m.role + '\\n' + m.content }}"
        "{% if m.role == 'assistant' %}<end_of_turn>{% endif %}<eos>{% endfor %}"
    )
    tokenizer = family_tokenizer("gemma3", template=template)
    chat = [*ASK, {"role": "assistant", "content": "MARK"}, {"role": "user", "content": "and now"}]
    ids = following_ids(tokenizer, [chat], mark="MARK", last_id=tokenizer.vocabulary[last])
    after = last + tokenizer.decode(ids, keeps_special=True)
    rest = "<start_of_turn>user\nand now<eos>"
    assert after == ("<end_of_turn><eos>" if last == "<end_of_turn>" else "<eos>") + rest


def test_white_space_before_the_template_s_end_token_is_left_out_with_it() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = family_tokenizer("mistral", template=template)
    chat = [*ASK, {"role": "assistant", "content": "MARK"}, {"role": "user", "content": "and now"}]
    ids = following_ids(tokenizer, [chat], mark="MARK", last_id=tokenizer.eos_id)
    assert tokenizer.decode(ids, keeps_special=True) == "<s>[INST] and now [/INST]"


def test_a_text_that_opens_answers_and_is_left_out_of_a_history_is_named() -> None:
    empty = "<think>\n\n</think>"
    opens = FAMILIES["qwen3"].template.replace(
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}",
    )
    assert kept_marks(family_tokenizer("qwen3", template=opens)) == empty
    named = {name for name in FAMILIES if kept_marks(family_tokenizer(name))}
    assert named == {"deepseek"}  # opens <think>


USER_COLON = (
    "{{ bos_token }}A chat. {% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
INSTRUCTION = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
BARS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (USER_COLON, ["USER:", "ASSISTANT:"]),
        (INSTRUCTION, ["[INST]", "[/INST]"]),
        (BARS, ["<|user|>", "<|assistant|>"]),
    ],
    ids=["Vicuna", "Llama 2", "Zephyr"],
)
def test_marks_of_roles_in_ordinary_text_are_named(
    monkeypatch: pytest.MonkeyPatch, template: str, marks: list[str]
) -> None:
    family = Family(template=template, special=("<s>", "</s>"), bos="<s>", eos="</s>")
    monkeypatch.setitem(FAMILIES, "plain", family)
    tokenizer = family_tokenizer("plain", begins_texts=True)
    assert plain_role_marks(tokenizer) == marks


def test_only_olmo_has_roles_in_ordinary_text() -> None:
    named = {
        name: marks for name in FAMILIES if (marks := plain_role_marks(family_tokenizer(name)))
    }
    assert named == {"olmo2": ["<|user|>", "<|assistant|>"]}
