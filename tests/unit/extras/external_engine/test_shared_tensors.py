"""Tests of the round trip of tensors through shared memory."""

import torch

from services.extras.external_engine.shared_tensors import open_shared, shared


def test_tensors_of_any_type_and_shape_survive_the_end_of_sharing() -> None:
    tensors = {
        "a": torch.randn(3, 5).to(torch.bfloat16),
        "b": torch.arange(7)[::2],
        "c": torch.randn(()),
        "d": torch.randn(4, 6).t(),
    }
    with shared(tensors) as description:
        opened_tensors = open_shared(description)
    assert opened_tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert opened_tensors[name].dtype == tensor.dtype
        assert torch.equal(opened_tensors[name], tensor)
