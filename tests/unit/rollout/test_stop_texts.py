"""Tests of plain stop texts and of special tokens as stop texts."""

from dataclasses import replace
from typing import Any

import pytest

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.extras.agents.chat import text_before
from services.rollout.engines.base import (
    GenerationRequest,
    ends_in_stop_text,
    split_stop_texts,
    unspelled_stop_texts,
)

TOKENIZER = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes"))


def request(context: str, **changes: Any) -> GenerationRequest:
    ids = tuple(TOKENIZER.encode(context))
    return GenerationRequest(request_id="r", context_ids=ids, max_tokens=9, seed=0, **changes)


@pytest.mark.parametrize("turn_tokens", range(6))
def test_a_stop_text_may_begin_anywhere_in_the_turn_but_not_before_it(turn_tokens: int) -> None:
    stop_request = request("ENDEN", turn_tokens=turn_tokens, stop_texts=("END",))
    is_stopped = ends_in_stop_text(stop_request, TOKENIZER.encode("D"), TOKENIZER.decode)
    assert is_stopped == (turn_tokens >= 2)


def test_special_tokens_stop_as_tokens() -> None:
    texts, ids = split_stop_texts(["###", "<pad>", "<eos>"], TOKENIZER)
    assert texts == ("###",)
    assert ids == {TOKENIZER.pad_id, TOKENIZER.eos_id}


@pytest.mark.parametrize("text", ["", "<eos>\n", "a<pad>"])
def test_stop_texts_that_no_response_shows_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="stop text"):
        split_stop_texts([text], TOKENIZER)


@pytest.mark.parametrize("turn_tokens", [0, 3])
@pytest.mark.parametrize("num_special", [1, 3, 40])
def test_special_tokens_inside_a_stop_text_do_not_hide_it(
    num_special: int, turn_tokens: int
) -> None:
    special = [TOKENIZER.pad_id] * num_special
    letters = [TOKENIZER.encode(letter)[0] for letter in "xEND"]
    tokens = [token for letter in letters for token in (letter, *special)][:-num_special]
    context, new = tokens[:turn_tokens], tokens[turn_tokens:]
    stop_request = replace(
        request("", turn_tokens=len(context), stop_texts=("END", "#")), context_ids=tuple(context)
    )
    assert ends_in_stop_text(stop_request, new, TOKENIZER.decode)
    assert not ends_in_stop_text(stop_request, new[:-1], TOKENIZER.decode)


def test_letters_of_several_tokens_do_not_hide_a_stop_text() -> None:
    tokens = TOKENIZER.encode("東" * 50 + "END")
    stop_request = request("", stop_texts=("東END",))
    assert ends_in_stop_text(stop_request, tokens, TOKENIZER.decode)


def test_stop_texts_that_no_tokens_spell_are_named() -> None:
    digits = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:0123456789="))
    assert unspelled_stop_texts(["<|nonsense|>", "12"], digits) == ["<|nonsense|>"]
    assert not unspelled_stop_texts(["<|nonsense|>", "東", "<pad>"], TOKENIZER)


def test_a_reply_ends_before_a_stop_text_with_special_tokens_inside() -> None:
    assert text_before("a E<p>N<p><p>D b", ["END"], skipped=["<p>"]) == "a "
    assert text_before("a E<p>ND b", ["END"]) == "a E<p>ND b"
