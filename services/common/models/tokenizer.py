"""Tokenizers: a model's own, ``chars:SYMBOLS``, or ``bytes``."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from services.common.models.configs import check_evaluates, find_file
from services.common.models.evaluator import CHATS, render
from services.common.models.made_tokenizers import (
    CHARS_PREFIX,
    EOS,
    PAD,
    make_builtin_tokenizer,
    tokenizer_name,
)
from services.common.runspec.run import ModelSpec

# Marks of the assistant's text in a template.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Tokenizer:
    """Converts between text and token ids with a ``PreTrainedTokenizerFast``.

    Args:
        inner: The tokenizer.
        name: Its name in messages.
        stop_ids: Further tokens that end a response.
        template_arguments: Arguments of the chat template besides messages and tools.
    """

    def __init__(
        self,
        inner: Any,
        *,
        name: str,
        stop_ids: Collection[int] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if inner.eos_token_id is None:
            raise ValueError(
                f"tokenizer {name!r} has no end-of-sequence token, so no response could end; use "
                "the tokenizer of a model for text generation"
            )
        self._inner = inner
        self._name = name
        self._stop_ids = frozenset({int(inner.eos_token_id), *stop_ids})
        self._special_tokens = {
            **{
                str(each): int(id_)
                for id_, each in inner.added_tokens_decoder.items()
                if each.special
            },
            **dict(zip(inner.all_special_tokens, inner.all_special_ids, strict=True)),
        }
        self._template_arguments = dict(template_arguments or {})
        first = inner.encode("", add_special_tokens=True)[:1]
        self._backend = _plain_backend(inner)
        self._first_ids = first if first == [inner.bos_token_id] else []

    @property
    def eos_id(self) -> int:
        """Token that ends a response."""
        return int(self._inner.eos_token_id)

    @property
    def stop_ids(self) -> frozenset[int]:
        """All tokens that end a response: the end token, and those of the model's ``generation_config``."""
        return self._stop_ids

    @property
    def pad_id(self) -> int:
        """Padding token; the end token if the model has no other."""
        pad = self._inner.pad_token_id
        return self.eos_id if pad is None else int(pad)

    @property
    def eos_text(self) -> str:
        """Text of the token that ends a response."""
        return str(self._inner.eos_token)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        return len(self._inner)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """All tokens, including added ones, with their ids."""
        return dict(self._inner.get_vocab())

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that :meth:`decode` skips, with their ids."""
        return self._special_tokens

    @property
    def has_chat_template(self) -> bool:
        """True if it renders chats."""
        return self._inner.chat_template is not None

    @property
    def chat_template(self) -> str:
        """Source of the chat template that renders chats with tools; empty without one."""
        template = self._inner.chat_template
        if isinstance(template, Mapping):  # several by name
            template = template.get("tool_use") or template.get("default")
        return template or ""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens around it.

        Raises:
            ValueError: If a ``chars:`` tokenizer has no token for one of the characters, or the
                text has a lone surrogate.
        """
        if self._name.startswith(CHARS_PREFIX):
            unknown = sorted(set(text) - set(self._inner.get_vocab()))
            if unknown:
                raise ValueError(
                    f"tokenizer {self._name!r} has no token for {', '.join(map(repr, unknown))} in "
                    f"{text[:80]!r}; add the characters to model.tokenizer, or use 'bytes'"
                )
        try:
            if self._backend is not None:
                # Encoding a batch of one skips the tokens' positions in the text: half the work.
                encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)
                return list(encoded[0].ids)
            return list(self._inner.encode(text, add_special_tokens=False))
        except TypeError as error:  # for a lone surrogate, which JSON can express and UTF-8 cannot
            raise ValueError(f"{text[:80]!r} has a surrogate that is no character") from error

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the token ids of a text that begins a context, after the model's first token, if any.

        For example, Llama's base models never saw a context without their beginning-of-sequence
        token.
        """
        return [*self._first_ids, *self.encode(text)]

    def decode(self, ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Returns the text of token ids.

        Args:
            ids: The tokens.
            keeps_special: True to include the texts of special tokens.
        """
        skips = not keeps_special
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=skips))
        return str(
            self._inner.decode(
                list(ids), skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
        )

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the token ids of a chat, up to the start of the assistant's answer.

        Raises:
            ValueError: If the tokenizer has no chat template.
        """
        return self.encode(self.render_chat(messages))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opens_answer: bool = True,
    ) -> str:
        """Returns the text of a chat, including special tokens.

        Args:
            messages: ``role``, ``content`` and further keys that the template reads, such as
                ``tool_calls``.
            tools: Tools that the assistant may call, in the format of OpenAI's API.
            opens_answer: True to include the start of the assistant's next answer.

        Raises:
            ValueError: If the tokenizer has no chat template, or the template refuses the messages.
        """
        text, _ = self._rendered(messages, tools, add_generation_prompt=opens_answer)
        return text

    def marked_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], list[bool]] | None:
        """Returns the token ids of a whole chat, and a mask of those that the template marks as generated.

        Returns None if the template has no marks (``{% generation %}``).

        Raises:
            ValueError: As :meth:`render_chat`.
        """
        if _GENERATION.search(str(self._inner.chat_template or "")) is None:
            return None
        text, places = self._rendered(messages, tools, return_assistant_tokens_mask=True)
        encoded = self._inner(text, add_special_tokens=False)
        marks = [False] * len(encoded["input_ids"])
        for begin, end in places:
            first = encoded.char_to_token(0, begin)
            last = encoded.char_to_token(0, end - 1)
            if first is not None:  # otherwise it is out of bounds
                past = len(marks) if last is None else last + 1
                marks[first:past] = [True] * (past - first)
        return list(encoded["input_ids"]), marks

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        **options: bool,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a chat, and the character ranges that the template marks as generated."""
        if self._inner.chat_template is None:
            raise ValueError(
                f"tokenizer {self._name!r} has no chat template; set data.chat_template to false, "
                "or use the tokenizer of a chat model"
            )
        offered = [dict(tool) for tool in tools] or None
        arguments = {
            # As in transformers: many templates print None for a key with that value.
            "conversations": [
                [{key: each for key, each in one.items() if each is not None} for one in messages]
            ],
            "tools": offered,
            **options,
            **self._inner.special_tokens_map,
            **self._template_arguments,
        }
        try:
            template = self._inner.get_chat_template(None, offered)
            is_ours = template == _CHAT_TEMPLATE
            evaluated = (
                render(template, **arguments) if is_ours else CHATS.evaluate(template, arguments)
            )
        except ValueError as error:
            raise ValueError(
                f"the chat template of tokenizer {self._name!r} refuses the messages: {error}"
            ) from error
        text, places = evaluated
        return text, places

    def save(self, folder: Path) -> None:
        """Writes the files from which Hugging Face's ``AutoTokenizer`` loads it."""
        self._inner.save_pretrained(folder)


def _plain_backend(inner: Any) -> Any:
    """Returns the inner tokenizer's backend; None if its class does more than call that.

    ``inner`` itself makes a batch of each text, for which it wakes threads, and inspects each token
    in Python. For the few hundred tokens of a turn that takes longer than the encoding.
    """
    from transformers import PreTrainedTokenizerFast

    does_more = [
        name
        for name in ("encode", "decode", "_encode_plus", "_decode")
        if getattr(type(inner), name, None) is not getattr(PreTrainedTokenizerFast, name)
    ]
    if does_more or inner.split_special_tokens:
        return None
    backend = inner.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


def load_tokenizer(
    model: ModelSpec, template_arguments: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
        model: The model.
        template_arguments: Arguments of the chat template besides messages and tools.

    Raises:
        ValueError: If there is no such tokenizer; the message has the key and the fix.
    """
    name = tokenizer_name(model)
    made = make_builtin_tokenizer(name)
    inner = _pretrained(name, model) if made is None else _fast(made)
    stop_ids = [] if model.is_tiny else _end_ids(model)
    return Tokenizer(inner, name=name, stop_ids=stop_ids, template_arguments=template_arguments)


def _end_ids(model: ModelSpec) -> list[int]:
    """Returns the end tokens in a model's ``generation_config.json``; instruct models list several."""
    path = find_file(model, "generation_config.json")
    if path is None:
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["eos_token_id"]
        ids = [found] if isinstance(found, int) else [int(one) for one in found or ()]
    except KeyError:
        return []
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"model.path {model.path!r}: generation_config.json does not say which tokens end a response "
            f"(eos_token_id: {error}); give it one id or a list of them"
        ) from error
    return ids


def _pretrained(name: str, model: ModelSpec) -> Any:
    from transformers import AutoTokenizer

    key = "model.tokenizer" if model.tokenizer else "model.path"
    try:
        # The tokenizer's class may depend on the model's configuration.
        with suppress(OSError):
            check_evaluates(model.model_copy(update={"path": name}))
        inner = AutoTokenizer.from_pretrained(
            name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        raise ValueError(
            f"{key} {name!r} has no tokenizer that loads ({_first_line(error)}); name a folder or "
            "a Hugging Face id with one, 'chars:SYMBOLS' or 'bytes'"
        ) from error
    # If the folder lacks its files, transformers creates an empty tokenizer for some families.
    if len(inner) <= len(set(inner.all_special_ids)):
        raise ValueError(
            f"{key} {name!r} has no tokenizer: it has no tokens but special ones; add its tokenizer.json"
        )
    return inner


def _fast(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        # Otherwise a model's own class would add a further token to the exported ones.
        unk_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
