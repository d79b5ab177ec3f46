"""The base of every part of a RunSpec: frozen, documented, unknown keys refused."""

from pydantic import BaseModel, ConfigDict


class SpecPart(BaseModel):
    """A frozen piece of a :class:`~services.common.spec.run.RunSpec`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
