"""Rows to prompts: template, chat template, tokens, limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from services.common.models.tokenizer import Tokenizer
from services.common.spec.data import DataSpec, PromptSourceSpec
from services.rollout.data import PromptSource, Row, column_value
from services.rollout.failures import GroupError

Message = Mapping[str, str]
"""``role`` and ``content``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a group answers."""

    token_ids: tuple[int, ...]
    """Tokens that the engine continues; none if an environment makes the prompt."""
    text: str
    """The prompt as people read it: filled template, or the last message of a chat."""
    answer: Any
    """Expected answer for the reward; None if the data has none."""
    row: Row
    """The whole row, for the reward."""
    data_source: str
    """Origin, for scores per source."""
    messages: tuple[Message, ...] = ()
    """The chat that it is; none if it went through no chat template."""


class PromptBook:
    """The prompts of a run by split and row.

    A prompt that cannot be used is refused alone: it raises, and its neighbours are not touched.
    """

    def __init__(
        self, data: DataSpec, sources: Mapping[str, PromptSource], tokenizer: Tokenizer
    ) -> None:
        self._data = data
        self._specs = data.sets
        self._sources = sources
        self._tokenizer = tokenizer

    @property
    def splits(self) -> tuple[str, ...]:
        """The sets that there are."""
        return tuple(self._sources)

    def num_rows(self, split: str) -> int:
        """Rows of a split; 0 if the run has none."""
        source = self._sources.get(split)
        return 0 if source is None else len(source)

    def prompt(self, split: str, row_index: int) -> Prompt:
        """Return one prompt.

        Raises:
            GroupError: If the row does not exist or is damaged, or its prompt is empty, too long, or of
                the wrong kind. Another try would not help.
        """
        if not 0 <= row_index < self.num_rows(split):
            raise _refused(
                "prompt_unknown",
                f"split {split!r} has {self.num_rows(split)} rows, but row {row_index} was asked",
            )
        try:
            row = self._sources[split][row_index]
        except ValueError as error:
            raise _refused("prompt_malformed", str(error)) from error
        spec = self._specs[split]
        column = self._data.answer_column_of(spec)
        if spec.source == "environment":
            return Prompt(token_ids=(), text="", answer=None, row=row, data_source=spec.path)
        place = f"row {row_index} of data.{split}"
        text, messages, token_ids = self._encode(row, spec, place)
        self._check_length(token_ids, place)
        return Prompt(
            token_ids=tuple(token_ids),
            text=text,
            answer=None if column is None else column_value(row, column),
            row=row,
            data_source=str(row.get("data_source", spec.path)),
            messages=messages,
        )

    def _encode(
        self, row: Row, spec: PromptSourceSpec, place: str
    ) -> tuple[str, tuple[Message, ...], Sequence[int]]:
        """Text, chat and tokens."""
        column = self._data.prompt_column_of(spec)
        content = column_value(row, column)
        if isinstance(content, str):
            text = self._data.prompt_template_of(spec).replace("{prompt}", content)
            messages: Sequence[Message] = [{"role": "user", "content": text}]
        elif _are_messages(content) and self._data.chat_template:
            messages = cast("Sequence[Message]", content)
            text = messages[-1]["content"]
        else:
            raise _refused(
                "prompt_malformed",
                f"column {column!r} in {place} must hold text or, with "
                f"data.chat_template, chat messages, but holds {type(content).__name__}",
            )
        try:
            if self._data.chat_template:
                return text, tuple(messages), self._tokenizer.apply_chat_template(messages)
            return text, (), self._tokenizer.encode_prompt(text)
        except ValueError as error:
            raise _refused("prompt_malformed", f"{place}: {error}") from error

    def _check_length(self, token_ids: Sequence[int], place: str) -> None:
        if not token_ids:
            raise _refused("prompt_empty", f"{place} has an empty prompt; remove or fill the row")
        if len(token_ids) > self._data.max_prompt_tokens:
            raise _refused(
                "prompt_too_long",
                f"{place} has {len(token_ids)} tokens, more than data.max_prompt_tokens "
                f"({self._data.max_prompt_tokens}); raise it or remove the row",
            )


def check_prompt(row: Row, data: DataSpec, spec: PromptSourceSpec, *, key: str) -> None:
    """Look at the kind of a row's prompt, before there is a tokenizer.

    Args:
        row: A row that has the columns.
        data: Names the columns.
        spec: The set that it is of.
        key: Key of the source, for the message.

    Raises:
        ValueError: If no prompt can be made of it.
    """
    column = data.prompt_column_of(spec)
    content = column_value(row, column)
    if isinstance(content, str) and content:
        return
    if _are_messages(content):
        if data.chat_template:
            return
        raise ValueError(
            f"data.prompt_column {column!r} of {key} holds chat messages, but data.chat_template "
            "is false; set it to true, or name a column with text"
        )
    raise ValueError(
        f"data.prompt_column {column!r} of {key} must hold text or a list of messages with role "
        f"and content, but holds {content!r:.60}; name another column"
    )


def _are_messages(content: object) -> bool:
    return (
        isinstance(content, Sequence)
        and len(content) > 0
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in content
        )
    )


def _refused(reason: str, message: str) -> GroupError:
    return GroupError(reason, message, retryable=False)
