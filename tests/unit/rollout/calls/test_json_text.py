"""Conversion of row values that JSON cannot represent to the values that user code receives."""

import datetime
import json

import numpy as np
import pytest
import torch

from services.rollout.calls.outside import json_text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(5), 5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.arange(2000), list(range(2000))),
        (torch.tensor([[1, 2]]), [[1, 2]]),
        ((0, 1), [0, 1]),
        ({3}, [3]),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        ({(0, 1): np.int8(2), 3: {None: (4,)}}, {"(0, 1)": 2, "3": {"None": [4]}}),
    ],
)
def test_values_keep_their_meaning(value: object, expected: object) -> None:
    assert json.loads(json_text({"row": value})) == {"row": expected}
