"""Tests that weight buckets are written directly into the parameters of all workers of an engine."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from services.extras.external_engine.in_place import (
    FlatTarget,
    Placements,
    handle_weight_command,
    place_in_workers,
)
from services.extras.external_engine.layout import Piece, UnknownLayoutError, copy_weights
from services.weightsync.endpoints import Place
from services.weightsync.weight_plan import WeightPlan
from tests.helpers.placing import place_all
from tests.unit.extras.external_engine.test_layout import VOCAB, checkpoint, engine_parameters


class Workers:
    """Fake engine with all its workers in this process."""

    def __init__(self, parameters: list[dict[str, Tensor]]) -> None:
        self.models = [_model(parameter) for parameter in parameters]
        self.num_commands = 0

    async def load(self, order: str) -> None:
        self.num_commands += 1
        for rank, model in enumerate(self.models):
            assert handle_weight_command(
                order, model, rank=rank, ranks=len(self.models), has_plain_experts=True
            )


def _model(parameters: dict[str, Tensor]) -> nn.Module:
    """Returns a module with the given parameters, by name."""
    model = nn.Module()
    for name, value in parameters.items():
        *path, leaf = name.split(".")
        owner = model
        for child in path:
            if not hasattr(owner, child):
                owner.add_module(child, nn.Module())
            owner = getattr(owner, child)
        owner.register_parameter(leaf, nn.Parameter(value))
    return model


async def write_all(
    workers: Workers, weights: dict[str, Tensor], num_sources: int, **changes: int
) -> None:
    """Writes weights as a transfer does, without a network."""
    opened: list[Placements] = []

    async def open_weights(plan: WeightPlan, slots: Sequence[Sequence[Tensor]]) -> Place:
        opened.append(await place_in_workers(plan, slots, workers.load))
        return opened[0].place

    await place_all(open_weights, weights, num_sources=num_sources, **changes)
    await opened[0].finish()


@pytest.mark.parametrize("num_slots", [2, 5, 1000])
async def test_buckets_whose_slots_are_not_needed_again_are_written_with_one_command(
    num_slots: int,
) -> None:
    weights = {"weight": torch.randn(20, 2048)}
    workers = Workers([{"weight": torch.zeros(20, 2048)}])
    await write_all(workers, weights, 1, num_slots=num_slots)
    # One command opens the weights, and one writes the last buckets.
    assert workers.num_commands == max(0, 20 - num_slots) + 2
    assert torch.equal(workers.models[0].weight, weights["weight"])


@pytest.mark.parametrize(("ranks", "num_sources"), [(1, 1), (1, 3), (2, 2), (4, 1), (8, 3)])
async def test_every_worker_receives_the_same_as_from_a_whole_copy(
    ranks: int, num_sources: int
) -> None:
    weights = checkpoint()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].bfloat16()
    padded = 48 if ranks > 1 else VOCAB
    workers = Workers([engine_parameters(ranks, padded) for _ in range(ranks)])
    await write_all(workers, weights, num_sources)
    for rank, model in enumerate(workers.models):
        expected = engine_parameters(ranks, padded)
        copy_weights(weights, expected, rank=rank, ranks=ranks)
        for name, value in model.named_parameters():
            assert torch.equal(value.nan_to_num(7), expected[name].nan_to_num(7)), name


@pytest.mark.parametrize("by_experts", [False, True])
async def test_plain_experts_are_written_whole_or_in_slices(*, by_experts: bool) -> None:
    name = "model.layers.0.mlp.experts"
    weights = {
        f"{name}.gate_up_proj": torch.randn(8, 48, 10),
        f"{name}.down_proj": torch.randn(8, 10, 24),
    }
    num_experts, width = (4, 24) if by_experts else (8, 12)
    shapes = {
        f"{name}.w13_weight": (num_experts, 2 * width, 10),
        f"{name}.w2_weight": (num_experts, 10, width),
    }

    def empty() -> dict[str, Tensor]:
        return {key: torch.zeros(shape) for key, shape in shapes.items()}

    workers = Workers([empty(), empty()])
    await write_all(workers, weights, 3)
    for rank, model in enumerate(workers.models):
        expected = empty()
        copy_weights(weights, expected, rank=rank, ranks=2, has_plain_experts=True)
        for key, value in model.named_parameters():
            assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_range_of_a_flat_tensor_finds_its_columns(dim: int) -> None:
    shape = (3, 4, 5)
    source = torch.arange(60.0).view(shape)
    piece = Piece(source="s", dim=dim, start=1, length=2, target="t", target_start=1)
    local_shape = tuple(4 if index == dim else size for index, size in enumerate(shape))
    expected = torch.full(local_shape, -1.0)
    expected.narrow(dim, 1, 2).copy_(source.narrow(dim, 1, 2))
    for first, last in itertools.combinations(range(0, 61, 3), 2):
        got = torch.full(local_shape, -1.0)
        target = FlatTarget(piece, shape, got)
        for begin, end in ((0, first), (first, last), (last, 60)):
            for columns, values in target.pairs(begin, source.flatten()[begin:end]):
                columns.copy_(values)
        assert torch.equal(got, expected), (first, last)


async def test_a_tensor_without_a_known_place_is_rejected_by_name_before_anything_is_written() -> (
    None
):
    parameters = engine_parameters(1, VOCAB)
    workers = Workers([parameters])
    weights = checkpoint() | {"model.layers.0.extra.weight": torch.randn(3, 3)}
    with pytest.raises(ValueError, match=r"layers\.0\.extra\.weight.*weight_sync\.mode"):
        await write_all(workers, weights, 1)
    assert all(value.isnan().all() for value in parameters.values())


def test_a_parameter_that_is_not_in_one_piece_is_unknown() -> None:
    piece = Piece(source="s", dim=0, start=0, length=4, target="t", target_start=0)
    with pytest.raises(UnknownLayoutError, match="'t'"):
        FlatTarget(piece, (4, 3), torch.zeros(3, 4).t())


def test_shared_tensors_are_no_weight_command() -> None:
    assert not handle_weight_command(
        '{"path": "x", "size": 1, "tensors": []}', nn.Module(), rank=0, ranks=1
    )
