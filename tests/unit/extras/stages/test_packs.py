"""Tests of the packs of a pipeline stage."""

import torch

from services.extras.stages.modules import StagePart
from services.trainer.batch.packing import pack
from services.wire.data.jagged import Jagged


def test_a_stage_holds_the_experts_of_its_own_layers_only() -> None:
    ids = torch.arange(5)
    experts = torch.randint(0, 8, (4, 6, 2), dtype=torch.uint8)
    experts[0] = 255  # unknown
    packed = pack(
        Jagged.from_list([ids[:2]]),
        Jagged.from_list([ids[2:]]),
        device=torch.device("cpu"),
        experts=Jagged.from_list([experts]),
    )
    stage = StagePart()
    stage.routers = slice(2, 4)
    stage_experts = stage.with_own_experts(packed).experts
    assert stage_experts is not None and packed.experts is not None
    assert stage_experts.untyped_storage().nbytes() == 4 * 2 * 2 * 2
    assert torch.equal(stage_experts.long(), packed.experts[:, 2:4])
    assert (stage_experts[0] == -1).all()
