"""Where prompts come from."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from services.common.spec.base import SpecPart


class PromptSourceSpec(SpecPart):
    """One set of prompts."""

    source: Literal["jsonl", "parquet", "huggingface", "python", "reasoning_gym"]
    """Kind of source."""
    path: str
    """A file (``jsonl``, ``parquet``), a dataset id (``huggingface``), ``module:function`` or
    ``file.py:function`` (``python``), or the task's name (``reasoning_gym``)."""
    split: str = "train"
    """Split of a ``huggingface`` dataset. Unused otherwise."""
    subset: str | None = None
    """Configuration of a ``huggingface`` dataset. Unused otherwise."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a ``python`` function or a ``reasoning_gym`` task."""
    limit: int | None = Field(None, ge=1)
    """Use only this many rows, from the start."""


class DataSpec(SpecPart):
    """Training and held-out prompts, and the columns that hold them."""

    train: PromptSourceSpec
    """Prompts to train on; issued in an order that depends on the seed and the epoch."""
    heldout: PromptSourceSpec | None = None
    """Prompts that are only ever evaluated."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages ``{role, content}``."""
    answer_column: str | None = "answer"
    """Column with the expected answer, handed to the reward; a dotted name such as
    ``reward_model.ground_truth`` reaches into a nested column. None if the reward needs none."""
    prompt_template: str = "{prompt}"
    """Text around each prompt; ``{prompt}`` stands for the column's text."""
    chat_template: bool = False
    """Whether prompts go through the tokenizer's chat template."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """A longer prompt is refused one by one: it is quarantined and counted, never cut."""
    shuffle: bool = True
    """Whether each epoch has its own order."""

    @model_validator(mode="after")
    def _template_names_the_prompt(self) -> Self:
        if "{prompt}" not in self.prompt_template:
            raise ValueError(
                "data.prompt_template must contain '{prompt}', but is "
                f"{self.prompt_template!r}; add '{{prompt}}' where the prompt belongs"
            )
        return self
