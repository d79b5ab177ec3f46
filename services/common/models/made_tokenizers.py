"""Built-in tokenizers ``chars:SYMBOLS`` and ``bytes``, and the interface of any vocabulary."""

from dataclasses import dataclass
from typing import Protocol

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from services.common.runspec.run import ModelSpec

CHARS_PREFIX = "chars:"
PAD, EOS, IMAGE = "<pad>", "<eos>", "<image>"


class Vocabulary(Protocol):
    """Properties of a tokenizer that a model's shape and the rules of a run depend on."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""

    @property
    def eos_id(self) -> int:
        """Token that ends a response."""

    @property
    def pad_id(self) -> int:
        """Padding token; the end token if the model has no other."""

    @property
    def has_chat_template(self) -> bool:
        """True if it renders chats."""


@dataclass(frozen=True, slots=True)
class BuiltinVocabulary:
    """Vocabulary of a built-in tokenizer."""

    vocab_size: int
    eos_id: int
    pad_id: int
    has_chat_template: bool = True


def tokenizer_name(model: ModelSpec) -> str:
    """Returns the tokenizer of a model: a folder, an id, ``chars:SYMBOLS`` or ``bytes``."""
    return model.tokenizer or ("bytes" if model.is_tiny else model.path)


def is_builtin_tokenizer(name: str) -> bool:
    return name == "bytes" or name.startswith(CHARS_PREFIX)


def make_builtin_tokenizer(name: str, *, images: bool = False) -> Tokenizer | None:
    """Builds the tokenizer of a name; returns None if it is not a built-in one.

    ``chars:SYMBOLS`` has ``<pad>`` (0), ``<eos>`` (1), then one token for each symbol; ``bytes``
    has ``<pad>``, ``<eos>``, then one token for each byte value.

    Args:
        images: True to add the placeholder ``<image>`` as the last token.

    Raises:
        ValueError: If symbols are missing or repeated.
    """
    if not is_builtin_tokenizer(name):
        return None
    tokenizer = _bytes() if name == "bytes" else _chars(name.removeprefix(CHARS_PREFIX))
    if images:
        tokenizer.add_special_tokens([IMAGE])
    return tokenizer


def builtin_vocabulary(name: str, *, images: bool = False) -> BuiltinVocabulary | None:
    """Returns the vocabulary of a built-in tokenizer; None for any other name.

    Raises:
        ValueError: As :func:`make_builtin_tokenizer`.
    """
    tokenizer = make_builtin_tokenizer(name, images=images)
    if tokenizer is None:
        return None
    eos_id, pad_id = tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)
    assert eos_id is not None
    assert pad_id is not None
    return BuiltinVocabulary(tokenizer.get_vocab_size(), eos_id, pad_id)


def _chars(symbols: str) -> Tokenizer:
    if not symbols or len(set(symbols)) != len(symbols):
        raise ValueError(
            f"model.tokenizer 'chars:{symbols}' must have at least one symbol and each symbol once; "
            "remove duplicates"
        )
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *symbols])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend
