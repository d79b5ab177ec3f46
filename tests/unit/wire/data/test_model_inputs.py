"""Bundles of model inputs: encoding, digests, and the inputs that a model accepts."""

import numpy as np
import pytest
import torch

from services.common.errors import DataLossError, InvalidArgumentError
from services.wire.data.model_inputs import ModelInputs, check_arguments, model_arguments
from tests.helpers.engines import make_model
from tests.helpers.features import feature_model, features

CPU = torch.device("cpu")
TENSORS = {
    "pixels": torch.randn(3, 4, 5),
    "halves": torch.randn(7).bfloat16(),
    "grid": torch.tensor([[1, 2, 3]]),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 6, dtype=torch.float16),
}


def test_a_bundle_round_trips_with_its_digest() -> None:
    bundle = ModelInputs.from_values(TENSORS)
    # Rows of a batch are concatenated, so a row's bytes may have any alignment.
    stored = torch.cat([torch.zeros(3, dtype=torch.uint8), bundle.encoded])[3:]
    decoded_bundle = ModelInputs.from_encoded(stored)
    assert decoded_bundle.digest == bundle.digest
    assert decoded_bundle.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert decoded_bundle.tensors[name].dtype == tensor.dtype
        assert torch.equal(decoded_bundle.tensors[name], tensor)


def test_arrays_and_lists_are_tensors_too() -> None:
    values = {"a": np.ones((2, 3), np.float32), "b": [[1.0, 2.0]], "c": [1, 2]}
    tensors = ModelInputs.from_values(values).tensors
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "a": (torch.float32, (2, 3)),
        "b": (torch.float32, (1, 2)),
        "c": (torch.int64, (2,)),
    }


def test_the_digest_depends_on_names_types_shapes_and_values_and_not_on_the_order() -> None:
    zeros = torch.zeros(2, 6)
    bundles = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.reshape(3, 4)},
        {"a": zeros.int()},
        {"a": zeros + 1e-7},
        {"a": zeros, "b": zeros},
    ]
    assert len({ModelInputs.from_values(bundle).digest for bundle in bundles}) == len(bundles)
    first, other = ({"a": zeros, "b": zeros + 1}, {"b": zeros + 1, "a": zeros})
    assert ModelInputs.from_values(first).digest == ModelInputs.from_values(other).digest


@pytest.mark.parametrize("values", [None, {}])
def test_a_prompt_without_inputs_has_an_empty_bundle(values: object) -> None:
    bundle = ModelInputs.from_values(values)
    assert (dict(bundle.tensors), len(bundle.encoded), bundle.digest) == ({}, 0, "")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([1, 2], "list"),
        ({"a": "text"}, "'a'"),
        ({"a": [[1], [1, 2]]}, "'a'"),
        ({"a": 1.0}, "dimension"),
        ({"input_ids": [1]}, "input_ids"),
        ({"inputs_embeds": [[1.0]]}, "inputs_embeds"),
        ({"a": [1], "position_ids": [0]}, "position_ids"),
    ],
    ids=str,
)
def test_what_is_no_bundle_is_refused(values: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelInputs.from_values(values)


def test_damaged_bytes_are_an_error() -> None:
    encoded = ModelInputs.from_values(TENSORS).encoded
    with pytest.raises(DataLossError):
        ModelInputs.from_encoded(encoded[: len(encoded) // 2])


def test_a_model_gets_only_what_its_forward_pass_names() -> None:
    check_arguments(feature_model().model, features(0, 2))
    with pytest.raises(ValueError, match="features"):
        check_arguments(make_model(0).base_model, features(0, 2))


def test_bundles_are_concatenated_in_order_and_must_agree() -> None:
    model = feature_model().model
    first, other = features(1, 2), features(2, 3)
    joined = model_arguments(model, [first, ModelInputs.from_values(None), other], CPU)
    expected = torch.cat([first.tensors["features"], other.tensors["features"]])
    assert torch.equal(joined["features"], expected)
    assert model_arguments(model, [], CPU) == {}
    wider = ModelInputs.from_values({"features": torch.zeros(1, 7)})
    with pytest.raises(InvalidArgumentError, match="features"):
        model_arguments(model, [first, wider], CPU)
