"""Prompt sources, filters and the curriculum of a run."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self

import regex
from pydantic import Discriminator, Field, Tag, model_validator

from services.common.doors import References
from services.common.runspec.base import MAX_SECONDS, NameIn, SpecPart
from services.common.runspec.rollout import RewardSpec

SOURCES: Final = References("prompt_sources")
"""The kinds of sources by the value of ``data.train.source``."""


class FilterSpec(SpecPart):
    """Selects rows of a set, by conditions on one column or by a function."""

    column: str | None = None
    """Column that the conditions refer to; a dotted name selects a nested column."""
    one_of: tuple[str | int | float | bool | None, ...] | None = None
    """Values that the column may have."""
    at_least: float | None = None
    """Min value of a number."""
    at_most: float | None = None
    """Max value of a number."""
    min_length: int | None = Field(None, ge=0)
    """Min number of characters of a text or a chat, or of items of a list."""
    max_length: int | None = Field(None, ge=0)
    """Max number of characters of a text or a chat, or of items of a list."""
    matches: str | None = Field(None, max_length=1000)
    """Regular expression that must match somewhere in the column's text."""
    function: str | None = None
    """``module:function`` or ``file.py:function``. The function receives the row and returns True
    to keep it."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        conditions = (self.one_of, self.at_least, self.at_most, self.min_length, self.max_length)
        is_conditional = any(condition is not None for condition in (*conditions, self.matches))
        if self.function is not None:
            if self.column is not None or is_conditional:
                raise ValueError(
                    "a filter has either a column with conditions or a function, got both; remove one"
                )
        elif self.column is None or not is_conditional:
            raise ValueError(
                "a filter needs a column with a condition (one_of, at_least, at_most, min_length, "
                "max_length, matches), or a function"
            )
        try:
            regex.compile(self.matches or "")
        except regex.error as error:
            raise ValueError(f"matches must be a regular expression: {error}") from error
        return self


class PromptSourceSpec(SpecPart):
    """One set of prompts."""

    source: Annotated[str, NameIn(SOURCES)]
    """Kind of source. ``environment`` provides ``limit`` rows ``{split, index}`` for an environment
    that creates its own prompts (``rollout.workflow: environment``)."""
    path: str
    """Location of the prompts: a file (``jsonl``, ``csv``, ``parquet``), a dataset id (``huggingface``),
    ``module:function`` or ``file.py:function`` (``python``), the name of a task
    (``reasoning_gym``), the id of a taskset (``verifiers``), or the environment's name of the
    split (``environment``)."""
    split: str = "train"
    """Split of a ``huggingface`` dataset. Unused otherwise."""
    subset: str | None = None
    """Configuration of a ``huggingface`` dataset. Unused otherwise."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a ``python`` function or a ``reasoning_gym`` task; for ``verifiers``,
    the fields of its ``EnvConfig``."""
    limit: int | None = Field(None, ge=1)
    """Max number of rows, counted from the start among the rows that pass the filters."""
    filters: tuple[FilterSpec, ...] = ()
    """Filters; a row is used if it passes all of them."""
    prompt_column: str | None = None
    """Column with the prompt in this set; null uses ``data.prompt_column``."""
    answer_column: str | None = None
    """Column with the expected answer in this set; null uses ``data.answer_column``."""
    prompt_template: str | None = None
    """Template of each prompt of this set; null uses ``data.prompt_template``."""
    rewards: tuple[RewardSpec, ...] | None = Field(None, min_length=1)
    """Rewards that score responses to this set; null uses ``rollout.rewards``."""


class WeightedSetSpec(PromptSourceSpec):
    """One of several sets of training prompts, which are mixed by weight."""

    weight: float | None = Field(None, gt=0)
    """Share of this set in the prompts, relative to the weights of the other sets. null, which must
    then hold for all sets, weights them by their number of rows, so that an epoch has every row
    once."""
    teacher_url: str | None = Field(None, pattern=r"^https?://")
    """Address of the served teacher of this set's responses; null uses ``teacher.url``."""


class HeldoutSetSpec(PromptSourceSpec):
    """One of several sets of held-out prompts, each with its own scores."""

    samples_per_prompt: int | None = Field(None, ge=0)
    """Sampled responses per prompt of this set; null uses ``validation.samples_per_prompt``."""


class CurriculumSpec(SpecPart):
    """Skips prompts for some steps, by the running mean of their groups' rewards or by your own function."""

    function: str | None = None
    """``module:function`` or ``file.py:function``, called with a prompt's row and its statistics
    before responses to the prompt are generated. The function returns True to generate them now.
    With a function, ``solved_from`` and ``hopeless_to`` default to null."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    timeout_s: float = Field(10.0, gt=0, le=MAX_SECONDS)
    """Max seconds of one call of the function; a later result counts as a failure of the prompt."""
    solved_from: float | None = 0.9
    """Mean reward at or above which a prompt counts as solved and is skipped; null skips no prompt
    as solved."""
    hopeless_to: float | None = 0.0
    """Mean reward at or below which a prompt counts as hopeless and is skipped; null skips no
    prompt as hopeless."""
    min_tries: int = Field(1, ge=1, le=1000)
    """Min groups of a prompt before it can be skipped."""
    newest_share: float = Field(0.5, gt=0, le=1)
    """Weight of the newest group in the running mean."""
    retry_after_steps: int = Field(50, ge=1)
    """Steps after which a skipped prompt is tried again, at its next position in the data order."""

    @model_validator(mode="before")
    @classmethod
    def _function_takes_the_place_of_bounds(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("function") is None:
            return values
        return {"solved_from": None, "hopeless_to": None, **values}


SetName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
"""Name of a set, which becomes part of metric names."""

ONE_SET: Final = "(one set)"
SEVERAL_SETS: Final = "(several sets)"
FORMS: Final = frozenset({ONE_SET, SEVERAL_SETS})
"""Names that pydantic puts into error locations for the two forms; they are not part of any key."""

_MAX_SETS = 64


def _form(value: object) -> str:
    """Returns the form in which prompts are given: one set, or several by name."""
    if not isinstance(value, Mapping) or not value or value.keys() & PromptSourceSpec.model_fields:
        return ONE_SET
    are_parts = all(
        isinstance(dataset, Mapping | PromptSourceSpec | None) for dataset in value.values()
    )
    return SEVERAL_SETS if are_parts else ONE_SET


TrainSets = Annotated[
    Annotated[PromptSourceSpec, Tag(ONE_SET)]
    | Annotated[dict[SetName, WeightedSetSpec], Field(max_length=_MAX_SETS), Tag(SEVERAL_SETS)],
    Discriminator(_form),
]
HeldoutSets = Annotated[
    Annotated[PromptSourceSpec, Tag(ONE_SET)]
    | Annotated[dict[SetName, HeldoutSetSpec], Field(max_length=_MAX_SETS), Tag(SEVERAL_SETS)],
    Discriminator(_form),
]


class DemonstrationSpec(SpecPart):
    """Training on answers from the data (``algorithm.loss: sft`` or ``dpo``)."""

    turns: Literal["all", "last"] = "all"
    """Assistant messages that are trained if ``data.prompt_column`` contains whole conversations.
    Use ``last`` for chat templates that render earlier answers differently, for example without
    their reasoning."""
    too_long: Literal["refuse", "cut"] = "refuse"
    """Treatment of a response that is longer than ``rollout.max_response_tokens`` or than the rest
    of the model's context. ``refuse``: its row is quarantined and counted. ``cut``: its end is
    cut off."""


class DataSpec(SpecPart):
    """Training and held-out prompts, and the columns that contain them."""

    train: TrainSets
    """Training prompts, issued in an order that depends on the seed and the epoch: one set, or
    several named sets that are mixed by weight."""
    heldout: HeldoutSets | None = None
    """Prompts that are only evaluated: one set, or several named sets."""
    epochs: float | None = Field(None, gt=0)
    """Length of the run as a number of passes over its training prompts, instead of
    ``trainer.steps``. Prompts of the next epoch complete the last batch."""
    curriculum: CurriculumSpec | None = None
    """Skips solved and hopeless prompts and tries them again later; null issues all prompts."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages ``{role, content}``."""
    answer_column: str | None = "answer"
    """Column with the expected answer, which the reward receives; a dotted name such as
    ``reward_model.ground_truth`` selects a nested column. None if the reward needs no answer."""
    model_inputs_column: str | None = None
    """Column with tensors that the model takes besides token ids, by the name of the argument of its forward
    pass, for example ``pixel_values``: a mapping of names to tensors, arrays or nested lists of numbers, or
    null for a prompt without any. Tensors of one name agree in type and in all but the first dimension."""
    image_column: str | None = "images"
    """Column with the images of a prompt, if rows have it (with ``model.images``): a list of paths
    relative to the data file, base64 data URLs, http(s) URLs, bytes, or ``{bytes, path}``. The text
    marks their places with ``<image>``; without marks they precede it. Messages may instead have
    parts ``{type: image, image: ...}`` or ``{type: image_url, ...}``."""
    max_images: int = Field(8, ge=1)
    """Max images of a prompt, or of a conversation with those of tools and agents. A prompt with more
    is quarantined; an episode fails."""
    max_image_bytes: int = Field(20 << 20, ge=1)
    """Max bytes of an encoded image. A prompt with a larger one is quarantined; an episode fails."""
    max_image_pixels: int = Field(1280 * 28 * 28, ge=1)
    """Images with more pixels are scaled down to this number before the model's image processor
    gets them."""
    rejected_column: str = "rejected"
    """For ``algorithm.loss: dpo`` only: column with the rejected answer. The preferred answer is in
    ``answer_column``, whose default is then ``chosen``."""
    demonstration: DemonstrationSpec = DemonstrationSpec()
    """Training on answers from the data (``algorithm.loss: sft`` or ``dpo``)."""
    prompt_template: str = "{prompt}"
    """Template of each prompt; ``{prompt}`` is replaced by the column's text."""
    chat_template: bool = False
    """If true, prompts are rendered with the tokenizer's chat template."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template besides messages and tools, for example ``enable_thinking:
    false``."""
    special_tokens_in_text: Literal["text", "control"] = "text"
    """Encoding of a control token, such as ``<|im_end|>``, in the text of a message or a tool.
    ``text``: as text, so that a text cannot end a turn or open another one. ``control``: as the
    token, for rows that contain tokens on purpose."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Max tokens of a prompt. A longer prompt is quarantined and counted; it is never truncated."""
    shuffle: bool = True
    """If true, each epoch has a different order."""

    @property
    def train_sets(self) -> dict[str, PromptSourceSpec]:
        """Sets of training prompts by split: ``train``, or ``train.NAME`` if there are several."""
        return _by_split("train", self.train)

    @property
    def heldout_sets(self) -> dict[str, PromptSourceSpec]:
        """Sets of held-out prompts by split: ``heldout``, or ``heldout.NAME`` if there are several."""
        return {} if self.heldout is None else _by_split("heldout", self.heldout)

    @property
    def sets(self) -> dict[str, PromptSourceSpec]:
        """All sets by split; the prefix ``data.`` makes a split the key of its set."""
        return {**self.train_sets, **self.heldout_sets}

    def prompt_column_of(self, dataset: PromptSourceSpec) -> str:
        return dataset.prompt_column or self.prompt_column

    def answer_column_of(self, dataset: PromptSourceSpec) -> str | None:
        """Returns the column with the expected answer in a set; None if it has none."""
        return dataset.answer_column or self.answer_column

    def prompt_template_of(self, dataset: PromptSourceSpec) -> str:
        return self.prompt_template if dataset.prompt_template is None else dataset.prompt_template


def _by_split(
    kind: str, sets: PromptSourceSpec | Mapping[str, PromptSourceSpec]
) -> dict[str, PromptSourceSpec]:
    if isinstance(sets, PromptSourceSpec):
        return {kind: sets}
    return {f"{kind}.{name}": dataset for name, dataset in sets.items()}


def kind_of(split: str) -> str:
    """Returns the kind of a split: ``train`` or ``heldout``."""
    return split.partition(".")[0]


def set_name(split: str) -> str:
    """Returns the name of a split's set; the kind if there is only one set."""
    return split.rpartition(".")[2]


def set_documents(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the sets of a specification in JSON form, with their keys.

    Args:
        data: The part ``data`` of a valid specification.
    """
    for kind in ("train", "heldout"):
        sets = data.get(kind)
        if not sets:
            continue
        if "source" in sets:
            yield f"data.{kind}", sets
        else:
            yield from ((f"data.{kind}.{name}", dataset) for name, dataset in sets.items())
