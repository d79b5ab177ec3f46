"""Conversion of rows to prompts: templates, tokens, limits; choice of prompts by a curriculum."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from services.common.models.tokenizer import Tokenizer, text_of
from services.common.runspec.data import CurriculumSpec, DataSpec, PromptSourceSpec, kind_of
from services.rollout.calls.pool import CallPool
from services.rollout.data.demonstrations import (
    Demonstration,
    Messages,
    Turns,
    as_messages,
    as_tools,
    check_answered,
    of_chat,
    of_text,
)
from services.rollout.data.sources import PromptSource, Row, column_value
from services.rollout.failures import CallError, GroupError, refused_prompt
from services.wire.workers import DEFERRED, PromptHistory

if TYPE_CHECKING:
    from services.rollout.data.images import ImageReader, Picture
    from services.wire.data.model_inputs import ModelInputs

_FILES = ("jsonl", "csv", "parquet")
"""Sources whose rows may name images relative to their file."""
Message = Mapping[str, Any]
"""``role`` and ``content``, which is text, or a list of parts if the message has images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of a group."""

    token_ids: tuple[int, ...]
    """Tokens that the engine continues; empty if an environment provides the prompt."""
    text: str
    """Text of the prompt: the filled template, or the last message of a chat."""
    answer: Any
    """Expected answer for the reward; None if the data has none."""
    row: Row
    """The row without the model's inputs, for the reward."""
    data_source: str
    """Source of the row, for scores per source."""
    messages: tuple[Message, ...] = ()
    """Messages of the chat; empty if no chat template was applied."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the row offers, in the format of OpenAI's API; empty if no chat template was applied."""
    teacher_ids: tuple[int, ...] = ()
    """Tokens that a teacher sees in place of the prompt; empty if it sees the prompt."""
    demonstrations: tuple[Demonstration, ...] = ()
    """Answers of the row, one for each member of a group; empty if answers are sampled."""
    model_inputs: "ModelInputs | None" = None
    """Tensors that the model takes besides tokens; None if no row of the run has any."""
    pictures: "tuple[Picture, ...]" = ()
    """The prompt's images, for people."""
    may_be_cut: bool = False
    """True if a demonstration that is too long may be truncated."""


class PromptStore:
    """Prompts of a run by split and row.

    An invalid row raises an error for its own group only.
    """

    def __init__(
        self,
        data: DataSpec,
        sources: Mapping[str, PromptSource],
        tokenizer: Tokenizer,
        *,
        num_demonstrations: int = 0,
        answers_heldout: bool = True,
        images: "ImageReader | None" = None,
        teacher_column: str | None = None,
    ) -> None:
        """Initializes the store; rows are read on demand.

        Args:
            num_demonstrations: Number of answers in each row; 0 if answers are sampled.
            answers_heldout: True if answers to held-out rows are sampled nevertheless.
            images: Reads images; None if the model takes no images.
            teacher_column: Column with the prompt that a teacher sees; None if it sees the policy's.
        """
        self._data = data
        self._specs = data.sets
        self._sources = sources
        self._tokenizer = tokenizer
        self._num_demonstrations = num_demonstrations
        self._answers_heldout = answers_heldout
        self._images = images
        self._teacher_column = teacher_column

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def num_rows(self, split: str) -> int:
        """Returns the number of rows of a split; 0 if the run does not have it."""
        source = self._sources.get(split)
        return 0 if source is None else len(source)

    async def read(self, split: str, row_index: int) -> Prompt:
        """Returns one prompt like :meth:`prompt`; reads rows with images or model inputs in a thread."""
        if self._data.model_inputs_column is None and self._images is None:
            return self.prompt(split, row_index)
        return await asyncio.to_thread(self.prompt, split, row_index)

    def prompt(self, split: str, row_index: int) -> Prompt:
        """Returns one prompt.

        Raises:
            GroupError: If the row does not exist or is damaged, or its prompt is empty, too long or
                of the wrong kind. A retry would not help.
        """
        if not 0 <= row_index < self.num_rows(split):
            raise refused_prompt(
                "prompt_unknown",
                f"split {split!r} has {self.num_rows(split)} rows, but row {row_index} was requested",
            )
        try:
            row = self._sources[split][row_index]
        except ValueError as error:
            raise refused_prompt("prompt_malformed", str(error)) from error
        column = self._data.model_inputs_column
        if column is None:
            return self._prompt(row, split, row_index)
        # Imported here, because the command line reads rows and does not need torch.
        from services.wire.data.model_inputs import ModelInputs

        try:
            inputs = ModelInputs.from_values(row.get(column))
        except ValueError as error:
            origin = f"column {column!r} in row {row_index} of data.{split}"
            raise refused_prompt("prompt_malformed", f"{origin}: {error}") from error
        rest = {name: value for name, value in row.items() if name != column}
        return replace(self._prompt(rest, split, row_index), model_inputs=inputs)

    def _prompt(self, row: Row, split: str, row_index: int) -> Prompt:
        spec = self._specs[split]
        column = self._data.answer_column_of(spec)
        if spec.source == "environment":
            return Prompt(token_ids=(), text="", answer=None, row=row, data_source=spec.path)
        origin, source = f"row {row_index} of data.{split}", str(row.get("data_source", spec.path))
        if self._num_demonstrations:
            has_rewards = self._answers_heldout or spec.rewards is not None
            is_sampled = kind_of(split) == "heldout" and has_rewards
            return self._demonstrated(row, spec, source, origin, is_sampled=is_sampled)
        tools = self._tools(row, origin)
        text, messages, token_ids, images = self._encode(row, spec, origin, tools)
        inputs: ModelInputs | None = None
        pictures: tuple[Picture, ...] = ()
        if self._images is not None:
            folder = Path(spec.path).parent if spec.source in _FILES else Path()
            token_ids, inputs, pictures = self._images.inputs_of(
                token_ids, images, folder=folder, origin=origin
            )
            row = self._without_images(row, spec, messages)
        self._check_length(token_ids, origin)
        teacher_ids: Sequence[int] = ()
        if self._teacher_column is not None and kind_of(split) == "train":
            _, _, teacher_ids, _ = self._encode(
                row, spec, origin, tools, column=self._teacher_column
            )
            self._check_length(teacher_ids, origin)
        return Prompt(
            token_ids=tuple(token_ids),
            teacher_ids=tuple(teacher_ids),
            text=text,
            answer=None if column is None else column_value(row, column),
            row=row,
            data_source=source,
            messages=messages,
            tools=tuple(tools),
            model_inputs=inputs,
            pictures=pictures,
        )

    def _without_images(self, row: Row, spec: PromptSourceSpec, messages: Sequence[Message]) -> Row:
        """Returns a row for rewards, without the images of its column and its messages."""
        column = self._data.prompt_column_of(spec)
        rest = {name: value for name, value in row.items() if name != self._data.image_column}
        if messages and not isinstance(rest.get(column, ""), str):
            rest[column] = list(messages)
        return rest

    def _demonstrated(
        self, row: Row, spec: PromptSourceSpec, source: str, origin: str, *, is_sampled: bool
    ) -> Prompt:
        """Returns a prompt with its answer, or with the preferred and the rejected answer."""
        data = self._data
        turns = "last" if is_sampled else data.demonstration.turns
        try:
            count = 1 if is_sampled else self._num_demonstrations
            chats = conversations_of(row, data, spec, origin, count=count)
            tools = self._tools(row, origin)
            every = [self._shown(messages, tools, turns) for messages in chats]
        except ValueError as error:
            raise refused_prompt("prompt_malformed", f"{origin}: {error}") from error
        if len({demonstration.prompt_ids for demonstration in every}) > 1:
            raise refused_prompt(
                "prompt_malformed",
                f"the answers in {origin} follow different prompts, so they cannot be compared; correct the "
                "conversations, or set data.demonstration.turns to 'last'",
            )
        messages, first_demonstration = chats[0], every[0]
        self._check_length(first_demonstration.prompt_ids, origin)
        return Prompt(
            token_ids=first_demonstration.prompt_ids,
            text=str(messages[-2].get("content") or ""),
            answer=first_demonstration.text,
            row=row,
            data_source=source,
            messages=tuple(messages[:-1]) if data.chat_template else (),
            tools=tuple(tools),
            demonstrations=() if is_sampled else tuple(every),
            may_be_cut=data.demonstration.too_long == "cut",
        )

    def _shown(self, messages: Messages, tools: Messages, turns: Turns) -> Demonstration:
        if self._data.chat_template:
            return of_chat(messages, tools, self._tokenizer, turns=turns)
        question, answer = (message["content"] for message in messages)
        return of_text(question, answer, self._tokenizer)

    def _tools(self, row: Row, origin: str) -> Messages:
        """Returns the tools of a row; empty if its prompt is no chat."""
        try:
            return as_tools(row.get("tools")) if self._data.chat_template else ()
        except ValueError as error:
            raise refused_prompt("prompt_malformed", f"{origin}: {error}") from error

    def _encode(
        self,
        row: Row,
        spec: PromptSourceSpec,
        origin: str,
        tools: Messages,
        *,
        column: str | None = None,
    ) -> tuple[str, tuple[Message, ...], Sequence[int], Sequence[Any]]:
        """Returns text, chat messages, tokens and images of a column, by default of the prompt."""
        key = "data.prompt_column" if column is None else "teacher.prompt_column"
        column = column or self._data.prompt_column_of(spec)
        content = column_value(row, column)
        if isinstance(content, str):
            content = self._data.prompt_template_of(spec).replace("{prompt}", content)
            messages: Sequence[Message] = [{"role": "user", "content": content}]
        elif _are_messages(content) and self._data.chat_template:
            messages = [
                # A message with calls may have no content.
                message if message.get("content") is not None else {**message, "content": ""}
                for message in cast("Sequence[Message]", content)
            ]
            if messages[-1]["role"] == "assistant":
                raise refused_prompt(
                    "prompt_malformed",
                    f"{key} {column!r} in {origin} ends with a message of 'assistant', but the model writes "
                    "the next one; remove the answer from the prompt",
                )
        else:
            raise refused_prompt(
                "prompt_malformed",
                f"{key} {column!r} in {origin} must be text or, with data.chat_template, chat messages with "
                f"role and content, got {content!r:.80}",
            )
        messages, images = self._with_images(row, messages, origin)
        last = messages[-1]["content"]
        parts = [{"type": "text", "text": last}] if isinstance(last, str) else last
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        try:
            if self._data.chat_template:
                token_ids = self._tokenizer.apply_chat_template(messages, tools)
                return text, tuple(messages), token_ids, images
            if isinstance(last, str):
                return text, (), self._tokenizer.encode_prompt(text), images
            assert self._images is not None
            token_ids = self._tokenizer.encode_prompt("")
            for number, part in enumerate(parts):
                is_text = part["type"] == "text"
                token_ids += (
                    self._tokenizer.encode(part["text"], continues=number > 0)
                    if is_text
                    else self._images.mark_ids
                )
            return text, (), token_ids, images
        except ValueError as error:
            raise refused_prompt("prompt_malformed", f"{origin}: {error}") from error

    def _with_images(
        self, row: Row, messages: Sequence[Message], origin: str
    ) -> tuple[Sequence[Message], Sequence[Any]]:
        """Returns messages whose images are parts, and the images in their order."""
        value = None if self._data.image_column is None else row.get(self._data.image_column)
        has_parts = any(
            part["type"] != "text"
            for message in messages
            if not isinstance(message["content"], str)
            for part in message["content"]
        )
        # Arrays of a data set have no truth value.
        if not has_parts and (value is None or (isinstance(value, Sequence) and not value)):
            return messages, ()
        if self._images is None:
            raise refused_prompt(
                "prompt_malformed",
                f"{origin} has images, but model.images is false; set it to true, or use rows without images "
                f"(data.image_column is {self._data.image_column!r})",
            )
        # Imported here, because most runs have no images.
        from services.rollout.data.images import with_parts

        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        images = [] if value is None else list(cast("Sequence[Any]", value)) if is_list else [value]
        try:
            return with_parts(messages, images)
        except (AttributeError, KeyError, TypeError) as error:
            raise refused_prompt(
                "prompt_malformed",
                f"{origin} has messages whose parts are not {{type: text, text}} or {{type: image, image}}: "
                f"{error!r}",
            ) from error

    def _check_length(self, token_ids: Sequence[int], origin: str) -> None:
        if not token_ids:
            raise refused_prompt(
                "prompt_empty", f"{origin} has an empty prompt; remove or fill the row"
            )
        if len(token_ids) > self._data.max_prompt_tokens:
            raise refused_prompt(
                "prompt_too_long",
                f"{origin} has {len(token_ids)} tokens, more than data.max_prompt_tokens "
                f"({self._data.max_prompt_tokens}); raise it or remove the row",
            )


def conversations_of(
    row: Row, data: DataSpec, spec: PromptSourceSpec, origin: str, *, count: int
) -> list[Messages]:
    """Returns the conversations of a row with demonstrations; each ends with one of the answers.

    Args:
        origin: Position of the row, for error messages.
        count: Number of answers in a row: one, or two, the preferred one first.

    Raises:
        ValueError: If the row has no valid answer to train.
    """
    keys = {"answer_column": data.answer_column_of(spec), "rejected_column": data.rejected_column}
    columns = list(keys.items())[:count]
    chats = [
        _conversation_of(row, data, spec, origin, column, is_only=count == 1) for column in columns
    ]
    if count > 1 and chats[0] == chats[1]:
        raise ValueError(
            f"data.answer_column {columns[0][1]!r} and data.rejected_column {columns[1][1]!r} of {origin} "
            "have the same answer, so neither is preferred; remove the row"
        )
    return chats


def _conversation_of(
    row: Row,
    data: DataSpec,
    spec: PromptSourceSpec,
    origin: str,
    column: tuple[str, str | None],
    *,
    is_only: bool,
) -> Messages:
    """Returns the conversation with the answer of a column, the row's only answer or one of a pair."""
    prompt_column, (key, answer_column) = data.prompt_column_of(spec), column
    prompt = column_value(row, prompt_column)
    source = f"data.prompt_column {prompt_column!r} of {origin}"
    if isinstance(prompt, str):
        text = data.prompt_template_of(spec).replace("{prompt}", prompt)
        messages: Messages = [{"role": "user", "content": text}]
    elif data.chat_template:
        messages = cast("Messages", prompt)
    else:
        raise ValueError(
            f"{source} is {prompt!r:.60}, but data.chat_template is false; set it to true for chat "
            "messages, or use a column with text"
        )
    if answer_column is not None:
        answer = column_value(row, answer_column)
        if data.chat_template and isinstance(answer, Sequence) and not isinstance(answer, str):
            turns = as_messages(answer, f"data.{key} {answer_column!r} of {origin}")
            is_whole = turns[0]["role"] != "assistant"
            messages = turns if is_whole else [*as_messages(messages, source), *turns]
        elif isinstance(answer, str) and answer:
            messages = [*as_messages(messages, source), {"role": "assistant", "content": answer}]
        else:
            fix = "use another column"
            if is_only:  # of a pair, both answers have columns
                fix += ", or null if data.prompt_column has whole conversations"
            raise ValueError(
                f"data.{key} {answer_column!r} of {origin} must be the answer's text, got "
                f"{answer!r:.60}; {fix}"
            )
    check_answered(as_messages(messages, source), source)
    pairs = ((message, text_of(message.get("content"))) for message in messages)
    return [message if text is None else {**message, "content": text} for message, text in pairs]


def check_prompt(
    row: Row,
    data: DataSpec,
    spec: PromptSourceSpec,
    *,
    key: str,
    num_demonstrations: int = 0,
) -> None:
    """Checks the type of a row's prompt; needs no tokenizer.

    Args:
        row: A row that has the columns.
        key: Configuration key of the source, for error messages.
        num_demonstrations: Number of answers that the row must have.

    Raises:
        ValueError: If the row cannot become a prompt.
    """
    if num_demonstrations:
        conversations_of(row, data, spec, key, count=num_demonstrations)
        return
    column = data.prompt_column_of(spec)
    content = column_value(row, column)
    if isinstance(content, str) and content:
        return
    if _are_messages(content):
        if data.chat_template:
            return
        raise ValueError(
            f"data.prompt_column {column!r} of {key} has chat messages, but data.chat_template "
            "is false; set it to true, or use a column with text"
        )
    raise ValueError(
        f"data.prompt_column {column!r} of {key} must be text or a list of messages with role "
        f"and content, got {content!r:.60}; use another column"
    )


def _are_messages(content: object) -> bool:
    return (
        isinstance(content, Sequence)
        and len(content) > 0
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and (
                isinstance(message.get("content"), str)
                or _are_parts(message.get("content"))
                or (message.get("content") is None and bool(message.get("tool_calls")))
            )
            for message in content
        )
    )


def _are_parts(content: object) -> bool:
    return (
        isinstance(content, Sequence)
        and len(content) > 0
        and all(
            isinstance(part, Mapping)
            and isinstance(part.get("type"), str)
            and (part["type"] != "text" or isinstance(part.get("text"), str))
            for part in content
        )
    )


class Curriculum:
    """Calls the function of a run's curriculum."""

    def __init__(self, spec: CurriculumSpec, calls: CallPool) -> None:
        self._spec = spec
        self._calls = calls

    async def check(self, row: Row, history: PromptHistory) -> None:
        """Asks the function if the prompt is worth sampling now; raises an error if it is not.

        Raises:
            GroupError: ``deferred`` if the function defers the prompt; ``curriculum_timeout``,
                ``curriculum_exception``, ``curriculum_sandbox_killed`` or
                ``curriculum_invalid_value`` if the function gave no valid answer.
        """
        reference = self._spec.function
        assert reference is not None, "a function is asked for"
        record = {
            "step": history.step,
            "tries": history.tries,
            "mean_reward": history.mean_reward if history.tries else None,
        }
        arguments, timeout_s = self._spec.arguments, self._spec.timeout_s
        try:
            answer = await self._calls.call(
                reference, (row, record), arguments, timeout_s=timeout_s
            )
        except CallError as error:
            raise _curriculum_error(error.kind, error.message) from error
        if not isinstance(answer, bool):
            raise _curriculum_error(
                "invalid_value",
                f"{reference!r} must return True (generate responses now) or False (skip the prompt), but "
                f"returned {answer!r:.60}",
            )
        if not answer:
            raise GroupError(DEFERRED, "the curriculum defers this prompt", retryable=True)


def _curriculum_error(kind: str, message: str) -> GroupError:
    return GroupError(f"curriculum_{kind}", f"data.curriculum.function: {message}", retryable=True)
