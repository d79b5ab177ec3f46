"""Layouts of a trainer: those that the rules and the model allow, their memory and bubble."""

from itertools import product

import pytest
from transformers import AutoConfig, PretrainedConfig

from services.checks.start.layouts import fitting_layout, layouts
from services.checks.start.memory import smallest_change
from services.common.memory.trainer import SPARE, trainer_memory
from services.common.models.families import check_trainer
from services.common.models.stages import bubble
from services.common.runspec.rules import problems
from services.common.runspec.run import RunSpec
from services.extras.planner.memory import distinct
from tests.helpers.specs import spec_with

MIXTURE: PretrainedConfig = AutoConfig.for_model(
    "qwen3_moe",
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
)
GPU_BYTES = 80 * 10**9


def spec_of(**trainer: object) -> RunSpec:
    return spec_with(
        trainer={"world_size": 8, "dtype": "bfloat16", **trainer},
        algorithm={"max_staleness": 1},
    )


def test_every_layout_that_rules_and_model_allow_is_planned_once() -> None:
    spec = spec_of()
    layouts_found = {
        (
            layout.pipeline_parallel,
            layout.tensor_parallel,
            layout.expert_parallel,
            layout.context_parallel,
        )
        for layout in layouts(spec, MIXTURE, gpu_bytes=GPU_BYTES)
    }
    allowed = set()
    for sizes in product((1, 2, 4, 8), repeat=4):
        stages, tensor, experts, context = sizes
        parts = {
            "tensor_parallel": tensor,
            "expert_parallel": experts,
            "context_parallel": context,
        }
        keys = {"pipeline_parallel": stages, "engine": "stages" if stages > 1 else "fsdp", **parts}
        changed = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=keys)})
        # The model has four layers.
        if (
            not [*problems(changed)]
            and not check_trainer(MIXTURE.to_dict(), **parts)
            and stages <= 4
        ):
            allowed.add(sizes)
    assert layouts_found == allowed
    assert {(1, 1, 1, 1), (2, 2, 2, 1), (4, 2, 1, 1), (1, 2, 4, 1), (2, 1, 2, 4)} <= layouts_found


def test_a_layout_has_the_memory_that_the_trainer_plans_and_the_bubble_of_its_micro_batches() -> (
    None
):
    spec = spec_of(tokens_per_micro_batch=256)
    for layout in layouts(spec, MIXTURE, gpu_bytes=GPU_BYTES):
        changed = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=layout.keys)})
        assert layout.memory == SPARE * trainer_memory(changed, MIXTURE, gpu_bytes=GPU_BYTES).used
        assert layout.bubble == bubble(layout.pipeline_parallel, layout.micro_batches)
        assert (layout.bubble > 0) == (layout.pipeline_parallel > 1)


def test_layouts_are_listed_from_the_cheapest_and_only_if_they_save_memory() -> None:
    listed = distinct(layouts(spec_of(), MIXTURE, gpu_bytes=GPU_BYTES))
    assert [layout.cost for layout in listed] == sorted(layout.cost for layout in listed)
    assert listed[0].keys == {
        "engine": "fsdp",
        **dict.fromkeys(
            ("pipeline_parallel", "tensor_parallel", "expert_parallel", "context_parallel"), 1
        ),
    }
    assert all(layout.fits for layout in listed)
    for layout in listed[1:]:
        assert layout.memory < listed[0].memory


def test_the_message_names_the_only_layout_in_which_a_run_fits() -> None:
    """A layout that keeps the whole model gathered needs more than one that divides it."""
    size = 16
    spec = spec_of(zero_stage=1, activation_checkpointing=True)
    everything = [layout.memory for layout in layouts(spec, MIXTURE, gpu_bytes=size * 10**9)]
    gpu_bytes = int(min(everything) * 1.001)
    changes = fitting_layout(spec, MIXTURE, gpu_bytes=gpu_bytes)
    assert changes is not None
    keys = {key.removeprefix("trainer."): value for key, value in changes.items()}
    changed = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=keys)})
    used = trainer_memory(changed, MIXTURE, gpu_bytes=gpu_bytes).used
    assert SPARE * used <= gpu_bytes
    assert [*problems(changed)] == []


@pytest.mark.parametrize("gpu_gb", [8, 10, 12])
def test_a_proposed_change_is_one_that_the_training_engine_supports(gpu_gb: int) -> None:
    spec = spec_of(engine="stages", pipeline_parallel=2)
    change = smallest_change(spec, MIXTURE, gpu_bytes=gpu_gb * 10**9, gpus=None)
    keys = {
        key.removeprefix("trainer."): value
        for key, value in change.items()
        if key.startswith("trainer.")
    }
    changed = spec.model_copy(update={"trainer": spec.trainer.model_copy(update=keys)})
    assert [problem for problem in problems(changed) if "trainer.engine" in problem] == []


def test_tensor_parallel_ranks_have_whole_heads() -> None:
    config = MIXTURE.to_dict()
    assert check_trainer(config, tensor_parallel=4) == []
    (problem,) = check_trainer({**config, "num_key_value_heads": 2}, tensor_parallel=4)
    assert "trainer.tensor_parallel is 4" in problem
    assert "num_key_value_heads is 2" in problem
