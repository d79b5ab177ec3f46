"""Which model is trained, and how a tiny one is made on the spot."""

from pydantic import Field

from services.common.spec.base import SpecPart

TINY_PREFIX = "tiny:"


class WarmStartSpec(SpecPart):
    """Supervised training that turns a random ``tiny:`` model into a base model.

    The result is cached by the digest of everything that shapes it, so it is made once.
    """

    examples: str
    """Import path ``module:function`` or ``file.py:function``; called with ``(count, seed)``, it
    returns ``(prompt, response)`` pairs of text."""
    steps: int = Field(500, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(64, ge=1)
    """Examples per step."""
    learning_rate: float = Field(1.5e-3, gt=0)
    """Peak learning rate of AdamW; 30 steps of warm-up, then a cosine down to 10 %."""


class ModelSpec(SpecPart):
    """The policy that is trained."""

    path: str = Field(min_length=1)
    """A local folder, a Hugging Face id, or a preset made on the spot such as ``tiny:qwen2-0.4m``."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id. Unused otherwise."""
    tokenizer: str | None = Field(None, min_length=1)
    """Folder or id of the tokenizer, ``chars:SYMBOLS`` (one token a character) or ``bytes``. Default:
    the model's own; a ``tiny:`` preset uses ``bytes``."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run. Only for models that you have read."""
    warm_start: WarmStartSpec | None = None
    """Makes a base model from a random ``tiny:`` preset."""

    @property
    def is_tiny(self) -> bool:
        """Whether the model is a preset made on the spot."""
        return self.path.startswith(TINY_PREFIX)
