"""Tests of the checksums of buckets."""

import torch

from services.weightsync.arena import WeightArena
from services.weightsync.weight_plan import make_plan
from tests.helpers.weight_members import SPECS


def test_checksum_sees_any_changed_and_any_swapped_words():
    arena = WeightArena(make_plan(SPECS, 1 << 16), torch.device("cpu"))
    embed = next(view for name, _, view in arena.pieces(0) if name == "embed")
    embed.copy_(torch.randn(333, 16))
    words = arena.buffers[0].view(torch.int64)
    before = arena.checksums(0)
    for first, second in ((0, 1), (0, 1024), (3, 2050)):
        words[[first, second]] = words[[second, first]]
        assert not torch.equal(arena.checksums(0), before)
        words[[first, second]] = words[[second, first]]
    assert torch.equal(arena.checksums(0), before)
    for bit in (0, 31, 63):
        words[1500] ^= -(1 << 63) if bit == 63 else 1 << bit
        assert not torch.equal(arena.checksums(0), before)
        words[1500] ^= -(1 << 63) if bit == 63 else 1 << bit
