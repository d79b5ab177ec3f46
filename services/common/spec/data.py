"""Where prompts come from."""

from typing import Any, Literal

from pydantic import Field

from services.common.spec.base import SpecPart


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
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """What the chat template reads besides messages and tools, for example ``enable_thinking: false``."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """A longer prompt is refused one by one: it is quarantined and counted, never cut."""
    shuffle: bool = True
    """Whether each epoch has its own order."""
