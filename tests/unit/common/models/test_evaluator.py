"""Tests that a model's files are evaluated in a process with a deadline and a memory limit."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.common.models import evaluator
from services.common.models.configs import full_config, read_config
from services.common.models.evaluator import Evaluator
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec

FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def chat(text: str = "hi", **options: Any) -> dict[str, Any]:
    return {"conversations": [[{"role": "user", "content": text}]], "tools": None, **options}


@pytest.fixture(scope="module")
def chats() -> Iterator[Evaluator]:
    templates = Evaluator("template", timeout_s=4.0)
    yield templates
    templates.close()


def test_a_chat_is_rendered_with_its_assistant_mask(chats: Evaluator) -> None:
    marked = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    template = "{{ bos }}" + marked
    arguments = chat("hé", bos="<s>", return_assistant_tokens_mask=True)
    assert chats.evaluate(template, arguments) == ["<s>hé", [[3, 5]]]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 4000000000 }}", "MiB of memory"),
        ("{{ 'a' * 17000000 }}", "MiB of text"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{% for %}", "(?i)expected"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_failing_template_raises_its_reason(
    chats: Evaluator, template: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chats.evaluate(template, chat())
    assert chats.evaluate("{{ messages[0].content }}", chat())[0] == "hi"


def test_a_template_that_was_stopped_often_is_not_tried_again(
    chats: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator, "_MAX_STOPS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(chats, "_timeout_s", 0.2)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"longer than 0\.2 s"):
                chats.evaluate(FOREVER, chat())
        with pytest.raises(ValueError, match="not tried again"):
            chats.evaluate(FOREVER, chat())
    assert chats.evaluate("{{ messages[0].content }}", chat())[0] == "hi"


def test_the_process_does_not_have_the_secrets_of_this_one(
    chats: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_ROLLOUT_RUN_TOKEN", "secret")
    chats.close()
    chats.evaluate("", chat())
    assert chats._process is not None
    environment = Path(f"/proc/{chats._process.pid}/environ").read_bytes()
    assert b"PATH=" in environment
    assert b"SLIPSTREAM" not in environment


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 10**9},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"vocab_size": 10**18},
        {"layer_types": [10**20]},
    ],
)
def test_absurd_sizes_of_a_model_are_rejected_by_name(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **changes}))
    model = ModelSpec(path=str(tmp_path))
    readers: tuple[Callable[[], Any], ...] = (
        lambda: read_config(model, None),
        lambda: full_config(model),
        lambda: load_tokenizer(model),
    )
    for read in readers:
        with pytest.raises(ValueError, match=next(iter(changes))):
            read()


def test_evaluating_a_config_is_limited_in_memory() -> None:
    configs = Evaluator("config", timeout_s=30.0)
    try:
        large = {"model_type": "granitemoehybrid", "num_hidden_layers": 10**9}
        with pytest.raises(ValueError, match="MiB of memory"):
            configs.evaluate(json.dumps(large))
        assert configs.evaluate(json.dumps({"model_type": "qwen2"})) is None
    finally:
        configs.close()
