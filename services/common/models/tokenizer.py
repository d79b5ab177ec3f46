"""Tokenizers: a model's own, ``chars:SYMBOLS``, or ``bytes``."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from services.common.models.chat_layout import ChatLayout, chat_layout
from services.common.models.configs import check_evaluates, find_file, missing_folder
from services.common.models.control_tokens import ControlTokens, Piece, without_first_space
from services.common.models.evaluator import CHATS, render
from services.common.models.made_tokenizers import (
    CHARS_PREFIX,
    EOS,
    PAD,
    make_builtin_tokenizer,
    tokenizer_name,
)
from services.common.runspec.run import ModelSpec, RunSpec

# Marks of the assistant's text in a template.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# An added token that is not flagged special and looks like this may still be a control token.
_MARK = re.compile(r"[<\[]\S+[>\]]")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Tokenizer:
    """Converts between text and token ids with a ``PreTrainedTokenizerFast``.

    Args:
        stop_ids: Further tokens that end a response.
        template_arguments: Arguments of the chat template besides messages and tools.
        time: Time that chat templates print, in seconds since 1970 (UTC); None for the time of each call.
        escapes_special: True to encode control tokens in the texts of a chat as text.
    """

    def __init__(
        self,
        inner: Any,
        *,
        name: str,
        stop_ids: Collection[int] = (),
        template_arguments: Mapping[str, Any] | None = None,
        time: float | None = None,
        escapes_special: bool = True,
    ) -> None:
        if inner.eos_token_id is None:
            raise ValueError(
                f"model.tokenizer {name!r} has no end-of-sequence token, so responses could not end; use "
                "the tokenizer of a model for text generation"
            )
        self._inner = inner
        self._name = name
        self._stop_ids = frozenset({int(inner.eos_token_id), *stop_ids})
        self._special_tokens = {
            **{
                str(added_token): int(id_)
                for id_, added_token in inner.added_tokens_decoder.items()
                if added_token.special
            },
            **dict(zip(inner.all_special_tokens, inner.all_special_ids, strict=True)),
        }
        self._added_tokens = {
            **{str(token): int(id_) for id_, token in inner.added_tokens_decoder.items()},
            **self._special_tokens,
        }
        self._template_arguments = dict(template_arguments or {})
        self._time = time
        self._escapes_special = escapes_special
        first = inner.encode("", add_special_tokens=True)[:1]
        self._backend = _plain_backend(inner)
        self._first_ids = first if first == [inner.bos_token_id] else []

    @property
    def eos_id(self) -> int:
        """Token that ends a response."""
        return int(self._inner.eos_token_id)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """All tokens that end a response.

        These are the end token, those of the model's ``generation_config``, and the one that the chat
        template writes after an assistant's message, which a base model's configuration does not list.
        """
        stop = self._layout.stop
        return self._stop_ids if stop is None else self._stop_ids | {self._added_tokens[stop]}

    @cached_property
    def turn_end_ids(self) -> frozenset[int]:
        """Tokens that end an assistant's message: :attr:`stop_ids`, and the template's own in a chat."""
        closing = self.closing_id
        return self.stop_ids if closing is None else self.stop_ids | {closing}

    @property
    def closing_id(self) -> int | None:
        """Token with which the chat template closes an assistant's message before another message.

        None if the first token of the next message does, as in GLM's templates.
        """
        closing = self._layout.closing
        return None if closing is None else self._added_tokens[closing]

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
        """Tokens that are flagged special, with their ids."""
        return self._special_tokens

    @cached_property
    def textless_tokens(self) -> Mapping[str, int]:
        """Tokens that :meth:`decode` leaves out, with their ids: special ones, and ends of responses."""
        stops = {text: id_ for text, id_ in self._added_tokens.items() if id_ in self.stop_ids}
        return {**self._special_tokens, **stops}

    def can_spell(self, text: str) -> bool:
        """Returns True if some sequence of tokens has this text."""
        try:
            ids = self.encode(text)
        except ValueError:
            return False
        unknown = self._inner.unk_token_id
        return unknown is None or ids.count(unknown) == text.count(self._inner.unk_token)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Tokens that are found in a text before the rest of it is divided into tokens."""
        return frozenset(self._added_tokens.values())

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

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Returns the token ids of a text, without special tokens around it.

        The text may be that of :meth:`render_chat`, in which control tokens in messages are escaped.

        Args:
            continues: True if other tokens precede the text. Tokenizers such as Llama 2's mark the start of
                every other text with a space.

        Raises:
            ValueError: If a ``chars:`` tokenizer has no token for one of the characters, or the
                text has a lone surrogate.
        """
        if not self._escapes_special:
            return self._encode(text, continues=continues)
        return [
            id_
            for number, piece in enumerate(self._control.pieces(text))
            for id_ in self._encode(piece.text, continues=continues or number > 0)
        ]

    def _encode(self, text: str, *, continues: bool = False) -> list[int]:
        if continues and self._inside is not None:
            match = self._added.search(text)
            start = match.start() if match else len(text)
            inside = self._inside.encode(text[:start], add_special_tokens=False).ids
            return [*inside, *(self._encode(text[start:]) if match else ())]
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
            raise ValueError(
                f"{text[:80]!r} contains a lone surrogate, which is not a character"
            ) from error

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a text that begins a context, after the beginning-of-sequence token, if any.

        For example, Llama's base models never saw a context without this token. A text that begins with the
        token gets no second one.
        """
        token_ids = self.encode(text)
        is_begun = token_ids[: len(self._first_ids)] == self._first_ids
        return token_ids if is_begun else [*self._first_ids, *token_ids]

    def decode(self, ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Returns the text of token ids.

        Args:
            keeps_special: True to include the texts of special tokens and of tokens that end a response.
        """
        skips = not keeps_special
        if skips and (unflagged := self._unflagged_stop_ids):
            ids = [id_ for id_ in ids if id_ not in unflagged]
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=skips))
        return str(
            self._inner.decode(
                list(ids), skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Returns the token ids of a chat, up to the start of the assistant's answer.

        Raises:
            ValueError: As :meth:`render_chat`.
        """
        return self.encode(self.render_chat(messages, tools))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opens_answer: bool = True,
    ) -> str:
        """Returns the text of a chat, including special tokens, for :meth:`encode`.

        Control tokens in the messages and tools are escaped, so that they are encoded as text. Content that
        is a list of texts is rendered as one text, unless the template reads lists only.

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
        text, spans = self._rendered(messages, tools, return_assistant_tokens_mask=True)
        ids, marks = list[int](), list[bool]()
        pieces = self._control.pieces(text) if self._escapes_special else [Piece(0, text)]
        for number, piece in enumerate(pieces):
            token_ids, offsets = self._encode_with_offsets(piece.text, continues=number > 0)
            ids += token_ids
            marks += [
                begin < end
                and any(
                    start < piece.start + end and piece.start + begin < stop
                    for start, stop in spans
                )
                for begin, end in offsets
            ]
        return ids, marks

    def escape(self, text: str) -> str:
        """Returns a text whose control tokens :meth:`encode` encodes as text."""
        return str(self._control.escape(text)) if self._escapes_special else text

    def _encode_with_offsets(
        self, text: str, *, continues: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns token ids, and the characters of the text that each of them covers."""
        if continues and self._inside is not None:
            match = self._added.search(text)
            start = match.start() if match else len(text)
            inside = self._inside.encode(text[:start], add_special_tokens=False)
            ids, offsets = self._encode_with_offsets(text[start:], continues=False)
            return [*inside.ids, *ids], [
                *inside.offsets,
                *((begin + start, end + start) for begin, end in offsets),
            ]
        encoded = self._inner(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    @cached_property
    def _layout(self) -> ChatLayout:
        template = self.chat_template
        if not template or template == _CHAT_TEMPLATE:
            return ChatLayout()
        added_tokens = [
            token
            for token in self._added_tokens
            if token in self._special_tokens or _MARK.fullmatch(token)
        ]
        return chat_layout(template, added_tokens, self._render_plainly)

    def _render_plainly(self, messages: Sequence[Mapping[str, Any]]) -> str:
        arguments = {**self._inner.special_tokens_map, **self._template_arguments}
        try:
            return self._evaluated(self.chat_template, arguments, messages)[0]
        except TypeError as error:  # the template's arguments clash
            raise ValueError(str(error)) from error

    def _evaluated(
        self, template: str, arguments: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[tuple[int, int]]]:
        names = {**arguments, "conversations": [messages]}
        if template == _CHAT_TEMPLATE:
            return render(template, **names)
        text, spans = CHATS.evaluate(template, {**names, "printed_time": self._time})
        return text, spans

    @cached_property
    def _control(self) -> ControlTokens:
        tokens = {*self._special_tokens, *self._layout.control_tokens}
        tokens |= {token for token, id_ in self._added_tokens.items() if id_ in self._stop_ids}
        normalizer = None if self._backend is None else self._backend.normalizer
        return ControlTokens(tokens, None if normalizer is None else normalizer.normalize_str)

    @cached_property
    def _unflagged_stop_ids(self) -> frozenset[int]:
        return self.stop_ids - frozenset(self._special_tokens.values())

    @cached_property
    def _added(self) -> re.Pattern[str]:
        tokens = sorted(self._added_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    @cached_property
    def _inside(self) -> Any:
        """Backend that marks no start of a text; None if the tokenizer's own marks none."""
        return None if self._backend is None else without_first_space(self._backend)

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a message as the template reads it, with all its texts escaped."""
        # As in transformers: many templates print None for a key with that value.
        fields = {key: value for key, value in message.items() if value is not None}
        if (text := text_of(fields.get("content"))) is not None:
            needs_parts = self._layout.needs_parts
            fields["content"] = [{"type": "text", "text": text}] if needs_parts else text
        return fields

    def _escaped(self, value: Any) -> Any:
        return self._control.escape(value) if self._escapes_special else value

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
        offered = [self._escaped(dict(tool)) for tool in tools] or None
        if offered and self.chat_template != _CHAT_TEMPLATE and "tools" not in self.chat_template:
            raise ValueError(
                f"the chat template of tokenizer {self._name!r} does not show tools; offer none, or use "
                "a model that calls tools"
            )
        prepared = [self._prepared(message) for message in messages]
        # Parsed first: JSON text may spell a control token with escapes.
        parsed = self._escaped([_with_parsed_calls(message) for message in prepared])
        arguments = {
            "tools": offered,
            **options,
            **self._inner.special_tokens_map,
            **self._template_arguments,
        }
        try:
            template = self._inner.get_chat_template(None, offered)
            try:
                return self._evaluated(template, arguments, parsed)
            except ValueError:  # a few templates print the arguments of calls, which must be text
                unparsed = self._escaped(prepared)
                if parsed == unparsed:
                    raise
                return self._evaluated(template, arguments, unparsed)
        except ValueError as error:
            raise ValueError(
                f"the chat template of tokenizer {self._name!r} rejects the messages: {error}"
            ) from error

    def save(self, folder: Path) -> None:
        """Writes the files from which Hugging Face's ``AutoTokenizer`` loads it."""
        self._inner.save_pretrained(folder)


def text_of(content: Any) -> str | None:
    """Returns the text of a message's content, which may be a list of texts; None if it is anything else."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content if isinstance(content, str) else None
    texts = [
        item["text"]
        for item in content
        if isinstance(item, Mapping)
        and item.get("type") == "text"
        and isinstance(item.get("text"), str)
    ]
    return "".join(texts) if texts and len(texts) == len(content) else None


def _with_parsed_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with the arguments of its tool calls as objects, which templates write as JSON.

    OpenAI's API and most data sets have them as JSON text, which would be written as a quoted string.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [_with_parsed_arguments(call) for call in calls]}


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        parsed = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _plain_backend(inner: Any) -> Any:
    """Returns the inner tokenizer's backend; None if the tokenizer's class does more than call the backend.

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
    model: ModelSpec,
    template_arguments: Mapping[str, Any] | None = None,
    *,
    time: float | None = None,
    escapes_special: bool = True,
) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
        template_arguments: Arguments of the chat template besides messages and tools.
        time: As in :class:`Tokenizer`.
        escapes_special: True to encode control tokens in the texts of a chat as text.

    Raises:
        ValueError: If there is no such tokenizer; the message has the key and the fix.
    """
    name = tokenizer_name(model)
    builtin_tokenizer = make_builtin_tokenizer(name, images=model.images)
    inner = _pretrained(name, model) if builtin_tokenizer is None else _fast(builtin_tokenizer)
    stop_ids = [] if model.is_tiny else _end_ids(model)
    return Tokenizer(
        inner,
        name=name,
        stop_ids=stop_ids,
        template_arguments=template_arguments,
        time=time,
        escapes_special=escapes_special,
    )


def load_chat_tokenizer(spec: RunSpec, *, time: float | None = None) -> Tokenizer:
    """Loads the tokenizer of a run's model with the run's settings of chats; see :func:`load_tokenizer`.

    Args:
        time: Time at which the run was created. A template that prints the date would otherwise change a
            row's prompt within the run.
    """
    return load_tokenizer(
        spec.model,
        spec.data.chat_template_arguments,
        time=time,
        escapes_special=spec.data.special_tokens_in_text == "text",
    )


def _end_ids(model: ModelSpec) -> list[int]:
    """Returns the end tokens in a model's ``generation_config.json``; instruct models list several."""
    path = find_file(model, "generation_config.json")
    if path is None:
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8"))["eos_token_id"]
        ids = [value] if isinstance(value, int) else [int(token_id) for token_id in value or ()]
    except KeyError:
        return []
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"model.path {model.path!r}: eos_token_id in generation_config.json is invalid ({error}); "
            "expected one token id or a list of them"
        ) from error
    return ids


def _pretrained(name: str, model: ModelSpec) -> Any:
    from transformers import AutoTokenizer

    key = "model.tokenizer" if model.tokenizer else "model.path"
    if problem := missing_folder(name):
        raise ValueError(f"{key}: {problem}")
    try:
        # The tokenizer's class may depend on the model's configuration.
        with suppress(OSError):
            check_evaluates(model.model_copy(update={"path": name}))
        inner = AutoTokenizer.from_pretrained(
            name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        raise ValueError(
            f"{key} {name!r}: no tokenizer can be loaded ({_first_line(error)}); use a folder or "
            "a Hugging Face id with a tokenizer, 'chars:SYMBOLS' or 'bytes'"
        ) from error
    # If the folder lacks its files, transformers creates an empty tokenizer for some families.
    if len(inner) <= len(set(inner.all_special_ids)):
        raise ValueError(
            f"{key} {name!r}: its tokenizer has only special tokens; add its tokenizer.json"
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


def check_teacher(spec: RunSpec) -> None:
    """Checks that the teacher of a run, if it has one, has the tokens of its policy.

    Raises:
        ValueError: If they differ; the message has the first difference.
    """
    if spec.teacher is None or spec.teacher.is_policy:
        return
    ids = load_tokenizer(spec.model).vocabulary
    teacher_ids = load_tokenizer(spec.teacher).vocabulary
    differing = sorted(
        ids.keys() ^ teacher_ids.keys() | {t for t in ids if ids[t] != teacher_ids.get(t)}
    )
    if differing:
        token = differing[0]
        raise ValueError(
            f"teacher and model need the same tokenizer, but {len(differing)} of their {len(teacher_ids)} "
            f"and {len(ids)} tokens differ: {token!r} has id {teacher_ids.get(token, 'none')} in teacher and "
            f"{ids.get(token, 'none')} in model; use a teacher of the same family"
        )
