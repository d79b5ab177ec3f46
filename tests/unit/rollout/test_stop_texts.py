"""Tests of plain stop texts and of special tokens as stop texts."""

from typing import Any

import pytest

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec
from services.rollout.engines.base import GenerationRequest, ends_in_stop_text, split_stop_texts

TOKENIZER = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="bytes"))


def request(context: str, **changes: Any) -> GenerationRequest:
    ids = tuple(TOKENIZER.encode(context))
    return GenerationRequest(request_id="r", context_ids=ids, max_tokens=9, seed=0, **changes)


@pytest.mark.parametrize("turn_tokens", range(6))
def test_a_stop_text_may_begin_anywhere_in_the_turn_but_not_before_it(turn_tokens: int) -> None:
    asked = request("ENDEN", turn_tokens=turn_tokens, stop_texts=("END",))
    is_stopped = ends_in_stop_text(asked, TOKENIZER.encode("D"), TOKENIZER.decode)
    assert is_stopped == (turn_tokens >= 2)


def test_special_tokens_stop_as_tokens() -> None:
    texts, ids = split_stop_texts(["###", "<pad>", "<eos>"], TOKENIZER)
    assert texts == ("###",)
    assert ids == {TOKENIZER.pad_id, TOKENIZER.eos_id}


@pytest.mark.parametrize("text", ["", "<eos>\n", "a<pad>"])
def test_stop_texts_that_no_response_shows_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="stop text"):
        split_stop_texts([text], TOKENIZER)
