"""Tests of built-in tokenizers and of tokenizers in folders: round trips, special tokens, chat templates."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec


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


def test_a_character_without_a_token_is_rejected() -> None:
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:ab"))
    with pytest.raises(ValueError, match="'c'"):
        tokenizer.encode("abc")


def test_half_a_character_is_rejected() -> None:
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m"))
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_a_repeated_symbol_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"model\.tokenizer 'chars:aa'"):
        load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:aa"))


def test_a_missing_tokenizer_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"model\.tokenizer 'no/such/folder'"):
        load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="no/such/folder"))


def test_a_chat_prompt_ends_before_the_answer() -> None:
    tokenizer = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m"))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "user: hi\nassistant: "


@pytest.fixture
def llama_like(tmp_path: Path) -> ModelSpec:
    """Returns a Llama-like model: a BOS token, two EOS tokens, and a chat template with an argument."""
    backend = Tokenizer(
        models.WordLevel({"<bos>": 0, "<eos>": 1, "<eot>": 2, "a": 3, "no": 4}, "a")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    inner.chat_template = "{{ messages[0]['content'] }}{% if not thinks %} no{% endif %}"
    inner.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return ModelSpec(path=str(tmp_path))


def test_texts_are_encoded_whole_and_as_the_models_own_tokenizer_does(
    llama_like: ModelSpec,
) -> None:
    path = Path(llama_like.path) / "tokenizer.json"
    limited = Tokenizer.from_file(str(path))
    limited.enable_truncation(2)
    limited.enable_padding(length=8)
    limited.save(str(path))
    tokenizer, own_tokenizer = (
        load_tokenizer(llama_like),
        AutoTokenizer.from_pretrained(llama_like.path),
    )
    for text in ("", "a", "a no a no a", "<eot>a<eos>no"):
        ids = tokenizer.encode(text)
        assert ids == own_tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == own_tokenizer.decode(ids, skip_special_tokens=True)


def test_every_end_token_of_the_model_ends_a_response(llama_like: ModelSpec) -> None:
    assert load_tokenizer(llama_like).stop_ids == {1, 2}
    assert load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m")).stop_ids == {1}


def test_a_prompt_starts_with_the_models_first_token(llama_like: ModelSpec) -> None:
    tokenizer = load_tokenizer(llama_like)
    assert tokenizer.encode_prompt("a") == [0, 3]
    assert tokenizer.encode("a") == [3]
    plain = load_tokenizer(ModelSpec(path="tiny:qwen2-0.4m", tokenizer="chars:ab"))
    assert plain.encode_prompt("a") == plain.encode("a")


def test_the_chat_template_reads_its_arguments(llama_like: ModelSpec) -> None:
    chat = [{"role": "user", "content": "a"}]
    assert load_tokenizer(llama_like).apply_chat_template(chat) == [3, 4]
    assert load_tokenizer(llama_like, {"thinks": True}).apply_chat_template(chat) == [3]


@pytest.mark.parametrize("written", ["arguments | tojson", "arguments + ''"])
def test_the_arguments_of_calls_may_be_json_text(llama_like: ModelSpec, written: str) -> None:
    template = f"{{{{ messages[0].tool_calls[0].function.{written} }}}}"
    (Path(llama_like.path) / "chat_template.jinja").write_text(template)
    calls = [{"function": {"name": "add", "arguments": '{"a": 1}'}}]
    chat = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert load_tokenizer(llama_like).render_chat(chat) == '{"a": 1}'


def test_tools_that_the_chat_template_does_not_show_are_refused(llama_like: ModelSpec) -> None:
    chat = [{"role": "user", "content": "a"}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    with pytest.raises(ValueError, match="tools"):
        load_tokenizer(llama_like).render_chat(chat, [tool])
