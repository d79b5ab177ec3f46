"""Base class of all parts of a RunSpec: frozen, documented, without unknown keys."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class SpecPart(BaseModel):
    """A frozen part of a :class:`~services.common.runspec.run.RunSpec`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Rejects YAML's ``yes`` and ``no`` for numbers; they would count as 1 and 0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        types = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and types & {int, float} and bool not in types:
            raise ValueError(f"must be a finite number, got {str(value).lower()}")
        return value
