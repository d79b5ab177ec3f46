"""Formats of a model's weights besides safetensors, through the door ``slipstream.weight_formats``.

A folder without ``*.safetensors`` files has the format whose marker it holds. Imports no torch.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, Protocol

from services.common.doors import Door


class OpenedWeights(Protocol):
    """Weights of a folder, under names of checkpoints of Hugging Face."""

    names: Collection[str]
    """Names of all tensors."""

    def reader(self) -> Any:
        """Returns a new ``StorageReader`` of torch DCP for these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A format by the name of its entry point in the group ``slipstream.weight_formats``."""

    marker: str
    """File by which a folder of the format is recognized."""
    opener: str
    """Reference ``module:function`` that takes a folder and returns ``OpenedWeights``; it executes nothing
    that the folder holds, and raises ValueError for weights that it cannot read."""
    writer: str
    """Reference of a function that takes a Hugging Face folder and a new or empty folder, and writes the
    same model there."""


FORMATS: Final = Door("weight_formats", WeightFormat)
"""The formats by the value of ``slipstream export --format``."""


def open_other_weights(folder: Path) -> OpenedWeights | None:
    """Opens the weights of a folder in a format of the door; None for safetensors and without weights.

    Raises:
        ValueError: If they are damaged, or named in a way that the trainer does not know.
    """
    if any(folder.glob("*.safetensors")):
        return None
    for name in FORMATS:
        if (folder / FORMATS[name].marker).is_file():
            opened: OpenedWeights = resolve_name(FORMATS[name].opener)(folder)
            return opened
    return None


def other_problems(folder: Path) -> Iterator[str]:
    """Yields the reason why a folder without safetensors has no weights that can be read."""
    try:
        if open_other_weights(folder) is None:
            markers = ", or the format ".join(
                f"{name} ({FORMATS[name].marker})" for name in FORMATS
            )
            choices = f", or the format {markers}" if markers else ""
            yield (
                f"{str(folder)!r} has no weights; use a folder with config.json and *.safetensors "
                f"files{choices}"
            )
    except ValueError as error:
        yield str(error)
