"""Tokenizers made on the spot round-trip, and load elsewhere once saved."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from services.common.models.tokenizer import load_tokenizer
from services.common.spec.model import ModelSpec


@pytest.mark.parametrize(
    ("name", "text"), [("chars:0123+=\n", "1+2=3\n"), ("bytes", "héllo\n\tworld 日本 ")]
)
def test_text_round_trips_and_the_saved_folder_loads_elsewhere(
    name: str, text: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer=name))
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    tokenizer.save(tmp_path)
    elsewhere = AutoTokenizer.from_pretrained(tmp_path)
    assert elsewhere.encode(text, add_special_tokens=False) == ids
    assert elsewhere.decode(ids) == text


def test_chars_put_pad_and_eos_first() -> None:
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:ab"))
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 4)
    assert tokenizer.encode("ba") == [3, 2]


def test_a_character_without_a_token_is_refused() -> None:
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:ab"))
    with pytest.raises(ValueError, match="no token for 'c'"):
        tokenizer.encode("abc")


def test_a_repeated_symbol_is_refused() -> None:
    with pytest.raises(ValueError, match="each once"):
        load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:aa"))


def test_a_missing_tokenizer_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"model\.tokenizer 'no/such/folder'"):
        load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="no/such/folder"))


def test_a_chat_ends_where_the_answer_begins() -> None:
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m"))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "user: hi\nassistant: "
