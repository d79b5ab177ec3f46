"""Tests of rows with answers: exactly the assistant's tokens train, or the row is refused."""

import json
from typing import Any

import pytest

from services.common.models.tokenizer import Tokenizer, load_tokenizer
from services.common.runspec.data import DataSpec
from services.common.runspec.run import ModelSpec
from services.rollout.data.demonstrations import Demonstration, of_chat, of_text
from services.rollout.data.prompts import PromptStore
from services.rollout.failures import GroupError
from tests.helpers.chat_families import FAMILIES, family_tokenizer, spaced_backend

# PLAIN and MARKED render the same text; MARKED marks the assistant's tokens with {% generation %}.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
# Drops the reasoning of all answers except the last.
FORGETFUL = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<eos>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>easy</think>2"},
    {"role": "user", "content": "and one more?"},
    {"role": "assistant", "content": "3"},
]


def tokenizer(template: str | None = None) -> Tokenizer:
    loaded = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes"))
    if template is not None:
        loaded._inner.chat_template = template
    return loaded


def parts(demonstration: Demonstration, template: str | None = None) -> list[tuple[str, bool]]:
    """Returns the text of the prompt and of each segment, end tokens included, and whether it trains."""
    decode = tokenizer(template)._inner.decode
    stretches = [(decode(list(s.token_ids)), s.is_answer) for s in demonstration.stretches]
    return [(decode(list(demonstration.prompt_ids)), False), *stretches]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_exactly_the_assistants_tokens_train(template: str) -> None:
    demonstration = of_chat(TALK, (), tokenizer(template), turns="all")
    assert parts(demonstration) == [
        ("system: be brief\nuser: 1+1?\nassistant: ", False),
        ("<think>easy</think>2<eos>", True),
        ("\nuser: and one more?\nassistant: ", False),
        ("3<eos>", True),
    ]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_last_answer_alone_may_train(template: str) -> None:
    demonstration = of_chat(TALK, (), tokenizer(template), turns="last")
    before = (
        "system: be brief\nuser: 1+1?\nassistant: <think>easy</think>2<eos>\nuser: and one more?\n"
    )
    assert parts(demonstration) == [(f"{before}assistant: ", False), ("3<eos>", True)]


def test_the_tokens_are_those_of_the_whole_rendered_conversation() -> None:
    used = tokenizer(PLAIN)
    demonstration = of_chat(TALK, (), used, turns="all")
    whole = used.encode(used.render_chat(TALK, opens_answer=False))
    token_ids = [
        *demonstration.prompt_ids,
        *(t for s in demonstration.stretches for t in s.token_ids),
    ]
    assert token_ids == whole[: len(token_ids)]
    assert used.decode(whole[len(token_ids) :]).strip() == ""


def test_a_template_that_rewrites_history_is_rejected_unless_the_last_answer_trains() -> None:
    with pytest.raises(ValueError, match=r"data\.demonstration\.turns.*'last'"):
        of_chat(TALK, (), tokenizer(FORGETFUL), turns="all")
    demonstration = of_chat(TALK, (), tokenizer(FORGETFUL), turns="last")
    assert "easy" not in parts(demonstration)[0][0]
    assert parts(demonstration)[1] == ("3<eos>", True)


def test_a_template_with_another_generation_prompt_than_answer_start_is_rejected() -> None:
    odd = PLAIN.replace("%}assistant: {%", "%}ASSISTANT> {%")
    with pytest.raises(ValueError, match="generation prompt"):
        of_chat(TALK, (), tokenizer(odd), turns="all")


def test_a_template_without_end_tokens_gets_one_after_the_last_answer() -> None:
    demonstration = of_chat(TALK, (), tokenizer(), turns="last")
    assert parts(demonstration)[1] == ("3<eos>", True)


def book(
    rows: list[Any], *, num_demonstrations: int = 1, template: str = PLAIN, **changes: Any
) -> PromptStore:
    source: Any = {"source": "jsonl", "path": "rows"}
    data = DataSpec(train=source, heldout=source, **changes)
    sources: Any = {"train": rows, "heldout": rows}
    used = tokenizer(template)
    return PromptStore(
        data, sources, used, num_demonstrations=num_demonstrations, answers_heldout=True
    )


def test_text_is_answered_by_text_and_an_end() -> None:
    prompt = book([{"prompt": "21=", "answer": "12"}]).prompt("train", 0)
    (demonstration,) = prompt.demonstrations
    assert parts(demonstration) == [("21=", False), ("12<eos>", True)]
    assert prompt.answer == "12"


def test_a_held_out_conversation_is_asked_for_its_last_answer() -> None:
    rows = [{"talk": TALK}]
    changes = {"prompt_column": "talk", "answer_column": None, "chat_template": True}
    prompt = book(rows, **changes).prompt("heldout", 0)
    assert prompt.demonstrations == ()
    assert prompt.answer == "3"
    used = tokenizer(PLAIN)
    assert list(prompt.token_ids) == used.encode(used.render_chat(TALK[:-1]))


CHAT = {"answer_column": None, "chat_template": True}


def test_content_as_a_list_of_texts_is_the_text_that_rewards_and_people_see() -> None:
    def said(role: str, *texts: str) -> dict[str, Any]:
        # Arrow gives each part the keys of all parts.
        content = [{"type": "text", "text": text, "image": None} for text in texts]
        return {"role": role, "content": content}

    question, answer = said("user", "1+", "2"), said("assistant", "3")
    prompt = book([{"prompt": [question, answer]}], **CHAT).prompt("train", 0)
    assert (prompt.text, prompt.answer) == ("1+2", "3")
    assert prompt.demonstrations[0].text == "3"
    pair = {"prompt": [question], "answer": [answer], "rejected": "3"}
    with pytest.raises(GroupError, match="have the same answer"):
        book([pair], num_demonstrations=2, chat_template=True).prompt("train", 0)


def test_the_tools_of_a_row_may_be_json_text() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    template = "{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}" + PLAIN
    rows = [{"prompt": TALK, "tools": row_tools} for row_tools in (tools, json.dumps(tools), 3)]
    store = book(rows, template=template, **CHAT)
    first, second = (store.prompt("train", row).demonstrations for row in range(2))
    assert first == second
    assert parts(first[0])[0][0].startswith("add\n")
    with pytest.raises(GroupError, match="tools"):
        store.prompt("train", 2)


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ({"prompt": "a"}, {}, "data.answer_column 'answer'.*None"),
        ({"prompt": "a", "answer": ""}, {}, "data.answer_column"),
        ({"prompt": "a"}, {"answer_column": None}, "data"),
        ({"prompt": TALK, "answer": "b"}, {}, "data.chat_template is false"),
        ({"prompt": TALK[:-1]}, CHAT, "data.answer_column"),
        ({"prompt": TALK[2:]}, CHAT, "data.prompt_column"),
        ({"prompt": []}, CHAT, "data.prompt_column"),
        ({"prompt": [{"content": "x"}]}, CHAT, "data.prompt_column"),
        ({"prompt": "a" * 2000, "answer": "b"}, {}, "data.max_prompt_tokens"),
    ],
)
def test_a_row_without_an_answer_is_rejected_with_its_key(
    row: Any, changes: Any, words: str
) -> None:
    with pytest.raises(GroupError, match=words) as raised:
        book([row], **changes).prompt("train", 0)
    assert not raised.value.retryable


def test_a_cut_keeps_what_fits() -> None:
    demonstration = of_chat(TALK, (), tokenizer(PLAIN), turns="all")
    first = len(demonstration.stretches[0].token_ids)
    cut = demonstration.cut(first + 3)
    assert cut.num_tokens == first + 3
    assert [stretch.is_answer for stretch in cut.stretches] == [True, False]
    assert demonstration.cut(demonstration.num_tokens) == demonstration


ASKED, NO, YES = TALK[1], {"role": "assistant", "content": "no"}, TALK[4]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "chosen": "3", "rejected": "no"},
        {"prompt": [ASKED], "chosen": "3", "rejected": "no"},
        {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]},
        {"prompt": "1+1?", "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    ],
    ids=["text", "messages", "answers", "conversations"],
)
def test_a_pair_may_be_given_as_people_have_it(row: Any) -> None:
    columns: Any = {"answer_column": "chosen", "chat_template": True}
    prompt = book([row], num_demonstrations=2, **columns).prompt("train", 0)
    chosen, rejected = prompt.demonstrations
    assert chosen.prompt_ids == rejected.prompt_ids == prompt.token_ids
    assert parts(chosen) == [("user: 1+1?\nassistant: ", False), ("3<eos>", True)]
    assert parts(rejected)[1] == ("no<eos>", True)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"chosen": "3", "rejected": "3"}, r"data\.rejected_column 'rejected'"),
        ({"chosen": "3"}, r"data\.rejected_column 'rejected' of row 0"),
        ({"chosen": "", "rejected": "3"}, r"data\.answer_column 'chosen' of row 0"),
        ({"chosen": [TALK[0], ASKED, YES], "rejected": "no"}, "row 0"),
        ({"chosen": [YES, ASKED], "rejected": [NO]}, "data"),
        ({"chosen": [YES], "rejected": [{"text": "no"}]}, r"data\.rejected_column"),
    ],
)
def test_a_pair_that_cannot_be_compared_is_rejected_alone(row: Any, key: str) -> None:
    rows = [{"prompt": [ASKED], **row}, {"prompt": [ASKED], "chosen": "3", "rejected": "no"}]
    columns: Any = {"answer_column": "chosen", "chat_template": True}
    pairs = book(rows, num_demonstrations=2, **columns)
    with pytest.raises(GroupError, match=key):
        pairs.prompt("train", 0)
    assert len(pairs.prompt("train", 1).demonstrations) == 2


UNENDED = (  # marks the content, but not the token that ends it
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "six"},
]


def answers_of(demonstration: Demonstration, chats: Tokenizer) -> list[str]:
    return [
        chats.decode(s.token_ids, keeps_special=True)
        for s in demonstration.stretches
        if s.is_answer
    ]


def test_marks_that_leave_out_the_end_token_train_it_nevertheless() -> None:
    chats = family_tokenizer("smollm2", template=UNENDED)
    assert answers_of(of_chat(UNMARKED, (), chats, turns="all"), chats) == [
        "three<|im_end|>",
        "six<|im_end|>",
    ]


def test_marks_of_a_template_without_end_tokens_train_the_end_of_sequence_token() -> None:
    template = UNENDED.replace("<|im_end|>", "").replace("<|im_start|>", "")
    chats = family_tokenizer("smollm2", template=template)
    assert answers_of(of_chat(UNMARKED, (), chats, turns="all"), chats) == [
        "three<|im_end|>",
        "six<|im_end|>",
    ]


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gpt_oss", "deepseek"}))
def test_each_answer_trains_a_token_at_which_sampling_stops(name: str) -> None:
    chats = family_tokenizer(name)
    demonstration = of_chat(UNMARKED, (), chats, turns="last" if name == "qwen3" else "all")
    answers = [s.token_ids for s in demonstration.stretches if s.is_answer]
    assert all(answer[-1] in chats.stop_ids for answer in answers)
    assert all(chats.decode(answer).rstrip().endswith(("three", "six")) for answer in answers)


def test_an_intermediate_answer_of_glm_ends_with_the_role_token_of_the_next_message() -> None:
    chats = family_tokenizer("glm4")
    function = {"name": "f", "arguments": {"x": 1}}
    talk = [
        *UNMARKED[:1],
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "three"},
        *UNMARKED[2:],
    ]
    ends = [answer[-20:] for answer in answers_of(of_chat(talk, (), chats, turns="all"), chats)]
    assert [end.partition("<|")[1] + end.partition("<|")[2] for end in ends] == [
        "<|observation|>",
        "<|user|>",
        "<|endoftext|>",
    ]


@pytest.mark.parametrize("scheme", ["first", "always", "normalizer"])
def test_an_answer_has_no_mark_of_a_start(scheme: str) -> None:
    family = FAMILIES["mistral"]
    chats = family_tokenizer("mistral", spaced_backend(family.special, scheme=scheme))
    demonstration = of_text("1 + 1 =", "three", chats)
    assert (
        chats.decode([*demonstration.prompt_ids, *demonstration.stretches[0].token_ids])
        == "1 + 1 =three"
    )
