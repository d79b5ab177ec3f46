"""Where prompts come from."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self

import regex
from pydantic import Discriminator, Field, Tag, model_validator

from services.common.runspec.base import SpecPart
from services.common.runspec.rollout import RewardSpec


class FilterSpec(SpecPart):
    """Which rows of a set are used: by one column, or by a function."""

    column: str | None = None
    """Column that all conditions beside it are about; a dotted name reaches into a nested one."""
    one_of: tuple[str | int | float | bool | None, ...] | None = None
    """Values that the column may have."""
    at_least: float | None = None
    """Least number that it may be."""
    at_most: float | None = None
    """Largest number that it may be."""
    min_length: int | None = Field(None, ge=0)
    """Least characters of a text or a chat, or items of a list."""
    max_length: int | None = Field(None, ge=0)
    """Most characters of a text or a chat, or items of a list."""
    matches: str | None = Field(None, max_length=1000)
    """Regular expression that is found in its text."""
    function: str | None = None
    """``module:function`` or ``file.py:function``, called with the row; True keeps it."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        conditions = (self.one_of, self.at_least, self.at_most, self.min_length, self.max_length)
        is_conditional = any(each is not None for each in (*conditions, self.matches))
        if self.function is not None:
            if self.column is not None or is_conditional:
                raise ValueError("a filter has a column with conditions or a function, not both")
        elif self.column is None or not is_conditional:
            raise ValueError(
                "a filter needs a column and a condition (one_of, at_least, at_most, min_length, max_length, "
                "matches), or a function"
            )
        try:
            regex.compile(self.matches or "")
        except regex.error as error:
            raise ValueError(f"matches is no regular expression: {error}") from error
        return self


class PromptSourceSpec(SpecPart):
    """One set of prompts."""

    source: Literal[
        "jsonl", "parquet", "huggingface", "python", "reasoning_gym", "verifiers", "environment"
    ]
    """Kind of source. ``environment`` has ``limit`` rows ``{split, index}``, for an environment that makes
    prompts itself (``rollout.workflow: environment``)."""
    path: str
    """A file (``jsonl``, ``parquet``), a dataset id (``huggingface``), ``module:function`` or
    ``file.py:function`` (``python``), a task's name (``reasoning_gym``), a taskset's id (``verifiers``), or
    what the environment calls its split (``environment``)."""
    split: str = "train"
    """Split of a ``huggingface`` dataset. Unused otherwise."""
    subset: str | None = None
    """Configuration of a ``huggingface`` dataset. Unused otherwise."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a ``python`` function or a ``reasoning_gym`` task; of ``verifiers``, what its
    ``EnvConfig`` says."""
    limit: int | None = Field(None, ge=1)
    """Use only this many rows, from the start, of those that pass the filters."""
    filters: tuple[FilterSpec, ...] = ()
    """What a row must pass, all of them, to be used."""
    prompt_column: str | None = None
    """Column with the prompt in this set; null is ``data.prompt_column``."""
    answer_column: str | None = None
    """Column with the expected answer in this set; null is ``data.answer_column``."""
    prompt_template: str | None = None
    """Text around each prompt of this set; null is ``data.prompt_template``."""
    rewards: tuple[RewardSpec, ...] | None = Field(None, min_length=1)
    """What scores responses to this set; null is ``rollout.rewards``."""


class WeightedSetSpec(PromptSourceSpec):
    """One of several sets of prompts that are mixed."""

    weight: float | None = Field(None, gt=0)
    """Share of the prompts, relative to the weights of the other sets. null, for all of them, is the number
    of rows, so that an epoch has every row once."""


class HeldoutSetSpec(PromptSourceSpec):
    """One of several sets of held-out prompts, with scores of its own."""

    samples_per_prompt: int | None = Field(None, ge=0)
    """Sampled responses per prompt of this set; null is ``validation.samples_per_prompt``."""


class CurriculumSpec(SpecPart):
    """Which prompts are set aside for a while: by the running mean of their groups' rewards, or by you."""

    function: str | None = None
    """``module:function`` or ``file.py:function``, called with a row and with what is known of its
    prompt, before it is answered; True has it answered now. ``solved_from`` and ``hopeless_to`` are then null
    by default."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    timeout_s: float = Field(10.0, gt=0)
    """Deadline of a call of the function; a late one is a failure of its prompt."""
    solved_from: float | None = 0.9
    """Mean reward from which a prompt counts as solved; null sets none aside for that."""
    hopeless_to: float | None = 0.0
    """Mean reward up to which a prompt counts as hopeless; null sets none aside for that."""
    min_tries: int = Field(1, ge=1, le=1000)
    """Groups of a prompt before it may be set aside."""
    newest_share: float = Field(0.5, gt=0, le=1)
    """Share of the newest group in the running mean."""
    retry_after_steps: int = Field(50, ge=1)
    """Steps after which a prompt that was set aside is tried again, at its next place in the order."""

    @model_validator(mode="before")
    @classmethod
    def _function_takes_the_place_of_bounds(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("function") is None:
            return values
        return {"solved_from": None, "hopeless_to": None, **values}


SetName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
"""Name of a set: it is part of metrics' names."""

ONE_SET: Final = "(one set)"
SEVERAL_SETS: Final = "(several sets)"
FORMS: Final = frozenset({ONE_SET, SEVERAL_SETS})
"""What pydantic calls the two forms in the places of problems; no part of any key."""

_MOST_SETS = 64


def _form(value: object) -> str:
    """Whether prompts are given as one set or as several by name."""
    if not isinstance(value, Mapping) or not value or value.keys() & PromptSourceSpec.model_fields:
        return ONE_SET
    are_parts = all(isinstance(part, Mapping | PromptSourceSpec | None) for part in value.values())
    return SEVERAL_SETS if are_parts else ONE_SET


TrainSets = Annotated[
    Annotated[PromptSourceSpec, Tag(ONE_SET)]
    | Annotated[dict[SetName, WeightedSetSpec], Field(max_length=_MOST_SETS), Tag(SEVERAL_SETS)],
    Discriminator(_form),
]
HeldoutSets = Annotated[
    Annotated[PromptSourceSpec, Tag(ONE_SET)]
    | Annotated[dict[SetName, HeldoutSetSpec], Field(max_length=_MOST_SETS), Tag(SEVERAL_SETS)],
    Discriminator(_form),
]


class DemonstrationSpec(SpecPart):
    """What of a row is trained under ``algorithm.loss: sft`` or ``dpo``, which learn from answers of rows."""

    turns: Literal["all", "last"] = "all"
    """Which messages of the assistant are trained, where ``data.prompt_column`` has whole conversations.
    ``last`` for chat templates that write earlier answers in another way, such as without their thoughts."""
    too_long: Literal["refuse", "cut"] = "refuse"
    """What happens to a response of more than ``rollout.max_response_tokens``, or than the model's context
    has room for: its row is set aside and counted, or its end is cut off."""


class DataSpec(SpecPart):
    """Training and held-out prompts, and the columns that hold them."""

    train: TrainSets
    """Prompts to train on; issued in an order that depends on the seed and the epoch. One set, or several by
    name that are mixed by weight."""
    heldout: HeldoutSets | None = None
    """Prompts that are only ever evaluated. One set, or several by name."""
    epochs: float | None = Field(None, gt=0)
    """How often the run goes through its training prompts, in place of ``trainer.steps``. The last batch is
    filled up from the beginning of the next epoch."""
    curriculum: CurriculumSpec | None = None
    """Sets prompts aside that are solved or hopeless, and tries them again after a while; null issues all."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages ``{role, content}``."""
    answer_column: str | None = "answer"
    """Column with the expected answer, handed to the reward; a dotted name such as
    ``reward_model.ground_truth`` reaches into a nested column. None if the reward needs none."""
    rejected_column: str = "rejected"
    """Column with the answer to which that of ``answer_column``, by default then ``chosen``, is preferred;
    read under ``algorithm.loss: dpo`` alone."""
    demonstration: DemonstrationSpec = DemonstrationSpec()
    """What of a row is trained under ``algorithm.loss: sft`` or ``dpo``."""
    prompt_template: str = "{prompt}"
    """Text around each prompt; ``{prompt}`` stands for the column's text."""
    chat_template: bool = False
    """Whether prompts go through the tokenizer's chat template."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """What the chat template reads besides messages and tools, for example ``enable_thinking: false``."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """A longer prompt is refused one by one: it is quarantined and counted, never cut."""
    shuffle: bool = True
    """Whether each epoch has its own order."""

    @property
    def train_sets(self) -> dict[str, PromptSourceSpec]:
        """Sets of training prompts by split, which is ``train``, or ``train.NAME`` of several."""
        return _by_split("train", self.train)

    @property
    def heldout_sets(self) -> dict[str, PromptSourceSpec]:
        """Sets of held-out prompts by split, which is ``heldout``, or ``heldout.NAME`` of several."""
        return {} if self.heldout is None else _by_split("heldout", self.heldout)

    @property
    def sets(self) -> dict[str, PromptSourceSpec]:
        """All sets by split: ``data.`` before it makes the key of one."""
        return {**self.train_sets, **self.heldout_sets}

    def prompt_column_of(self, part: PromptSourceSpec) -> str:
        """Column with the prompt in a set."""
        return part.prompt_column or self.prompt_column

    def answer_column_of(self, part: PromptSourceSpec) -> str | None:
        """Column with the expected answer in a set; None if it has none."""
        return part.answer_column or self.answer_column

    def prompt_template_of(self, part: PromptSourceSpec) -> str:
        """Text around each prompt of a set."""
        return self.prompt_template if part.prompt_template is None else part.prompt_template


def _by_split(
    kind: str, sets: PromptSourceSpec | Mapping[str, PromptSourceSpec]
) -> dict[str, PromptSourceSpec]:
    if isinstance(sets, PromptSourceSpec):
        return {kind: sets}
    return {f"{kind}.{name}": part for name, part in sets.items()}


def kind_of(split: str) -> str:
    """``train`` or ``heldout``."""
    return split.partition(".")[0]


def set_name(split: str) -> str:
    """The name of a set; where there is one alone, that of its kind."""
    return split.rpartition(".")[2]


def set_documents(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sets of a specification as JSON has it, with their keys.

    Args:
        data: The part ``data`` of a specification that is right.
    """
    for kind in ("train", "heldout"):
        sets = data.get(kind)
        if not sets:
            continue
        if "source" in sets:
            yield f"data.{kind}", sets
        else:
            yield from ((f"data.{kind}.{name}", part) for name, part in sets.items())
