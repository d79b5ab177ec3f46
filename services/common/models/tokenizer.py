"""Tokenizers behind one small protocol: a model's own, ``chars:SYMBOLS``, or ``bytes``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from services.common.spec.model import ModelSpec

_CHARS_PREFIX = "chars:"
_PAD, _EOS = "<pad>", "<eos>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def eos_id(self) -> int:
        """Token that ends a response."""
        ...

    @property
    def pad_id(self) -> int:
        """Token that fills up; the end token where the model has no other."""
        ...

    @property
    def eos_text(self) -> str:
        """Text of the token that ends a response."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Text of a chat, up to where the assistant's answer begins, special tokens included.

        Args:
            messages: ``role``, ``content`` and whatever else the template reads, such as ``tool_calls``.
            tools: Tools that the assistant may call, as OpenAI's API describes them.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the files from which Hugging Face's ``AutoTokenizer`` loads it."""
        ...


class HuggingFaceTokenizer:
    """A ``PreTrainedTokenizerFast`` as our :class:`Tokenizer`."""

    def __init__(self, inner: Any, *, name: str) -> None:
        if inner.eos_token_id is None:
            raise ValueError(
                f"tokenizer {name!r} has no end-of-sequence token, so no response could end; use "
                "the tokenizer of a model for text generation"
            )
        self._inner = inner
        self._name = name

    @property
    def eos_id(self) -> int:
        """Token that ends a response."""
        return int(self._inner.eos_token_id)

    @property
    def pad_id(self) -> int:
        """Token that fills up; the end token where the model has no other."""
        pad = self._inner.pad_token_id
        return self.eos_id if pad is None else int(pad)

    @property
    def eos_text(self) -> str:
        """Text of the token that ends a response."""
        return str(self._inner.eos_token)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return len(self._inner)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it.

        Raises:
            ValueError: If a ``chars:`` tokenizer has no token for one of the characters.
        """
        if self._name.startswith(_CHARS_PREFIX):
            unknown = sorted(set(text) - set(self._inner.get_vocab()))
            if unknown:
                raise ValueError(
                    f"tokenizer {self._name!r} has no token for {', '.join(map(repr, unknown))} in "
                    f"{text[:80]!r}; add the characters to model.tokenizer, or use 'bytes'"
                )
        return list(self._inner.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(
            self._inner.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins.

        Raises:
            ValueError: If the tokenizer has no chat template.
        """
        return self.encode(self.render_chat(messages))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Text of a chat, up to where the assistant's answer begins, special tokens included.

        Raises:
            ValueError: If the tokenizer has no chat template, or the template refuses the messages.
        """
        if self._inner.chat_template is None:
            raise ValueError(
                f"tokenizer {self._name!r} has no chat template; set data.chat_template to false, "
                "or use the tokenizer of a chat model"
            )
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            raise ValueError(
                f"the chat template of tokenizer {self._name!r} refuses the messages: {error}"
            ) from error
        return str(text)

    def save(self, folder: Path) -> None:
        """Write the files from which Hugging Face's ``AutoTokenizer`` loads it."""
        self._inner.save_pretrained(folder)


def load_tokenizer(model: ModelSpec) -> Tokenizer:
    """The tokenizer of a model.

    ``chars:SYMBOLS`` has ``<pad>`` (0), ``<eos>`` (1), then one token for each symbol; ``bytes`` has
    ``<pad>``, ``<eos>``, then one token for each byte value.

    Raises:
        ValueError: If there is no such tokenizer; the message names the key and the fix.
    """
    default = "bytes" if model.is_tiny else model.path
    name = model.tokenizer or default
    if name == "bytes":
        inner = _bytes_tokenizer()
    elif name.startswith(_CHARS_PREFIX):
        inner = _chars_tokenizer(name.removeprefix(_CHARS_PREFIX))
    else:
        inner = _pretrained(name, model)
    return HuggingFaceTokenizer(inner, name=name)


def _pretrained(name: str, model: ModelSpec) -> Any:
    from transformers import AutoTokenizer

    key = "model.tokenizer" if model.tokenizer else "model.path"
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key} {name!r} has no tokenizer that loads ({_first_line(error)}); name a folder or "
            "a Hugging Face id with one, 'chars:SYMBOLS' or 'bytes'"
        ) from error


def _chars_tokenizer(symbols: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if not symbols or len(set(symbols)) != len(symbols):
        raise ValueError(
            f"model.tokenizer 'chars:{symbols}' must list at least one symbol, each once; remove "
            "the repeated ones"
        )
    vocabulary = {token: index for index, token in enumerate([_PAD, _EOS, *symbols])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return _fast(backend)


def _bytes_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([_PAD, _EOS, *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _fast(backend)


def _fast(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, pad_token=_PAD, eos_token=_EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
