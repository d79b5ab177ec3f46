"""Golden vectors as flat float64 tensors."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer.batch.segments import Segments

_FOLDER = Path(__file__).parents[2] / "vectors"


def cases(file: str) -> list[Any]:
    return list(json.loads((_FOLDER / f"{file}.json").read_text())["cases"])


def case(file: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    vector = next(item for item in cases(file) if item["name"] == name)
    return vector["inputs"], vector["expected"]


def flat(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).flatten()


def mask_of(rows: Any) -> Tensor:
    return flat(rows).bool()


def segments_of(rows: list[list[float]]) -> Segments:
    return Segments.from_lengths(torch.tensor([len(row) for row in rows]))


def groups_of(names: list[str]) -> Tensor:
    distinct_names = list(dict.fromkeys(names))
    return torch.tensor([distinct_names.index(name) for name in names])


def assert_close(actual: Tensor, expected: Any, mask: Tensor | None = None) -> None:
    expected_values = (
        flat(expected)
        if isinstance(expected, list)
        else torch.tensor(float(expected), dtype=torch.float64)
    )
    if mask is not None:
        actual, expected_values = actual[mask], expected_values[mask]
    torch.testing.assert_close(actual.double(), expected_values.double(), rtol=1e-9, atol=1e-9)
