import torch

from services.weightsync.arena import copy_all


def test_small_and_large_tensors_of_every_type_are_copied_into_their_places() -> None:
    shapes = [(3,), (0, 4), (), (1024, 1025), (2, 2)]
    dtypes = [torch.bfloat16, torch.float32, torch.int64, torch.float32, torch.uint8]
    tensors = [torch.rand(s).mul(9).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    wide = torch.zeros(1024, 2050)
    # A part of a fused parameter is a non-contiguous view.
    places = [torch.zeros_like(tensor) for tensor in tensors]
    places[3] = wide[:, :1025]
    copy_all(places, tensors)
    for target, tensor in zip(places, tensors, strict=True):
        assert torch.equal(target, tensor)
    assert not wide[:, 1025:].any()


def test_nothing_to_copy_is_fine() -> None:
    copy_all([], [])
