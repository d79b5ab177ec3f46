"""sort4 learns with a trainer of pipeline stages, and with experts on tensor-parallel ranks."""

import pytest

from tests.helpers.cli import SORT4, train

pytestmark = [pytest.mark.learning, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_stages_learn_to_sort(tmp_path, seed, tensor_parallel):
    result = train(
        SORT4,
        tmp_path,
        f"seed={seed}",
        "trainer.engine=stages",
        "trainer.pipeline_parallel=2",
        f"trainer.world_size={2 * tensor_parallel}",
        f"trainer.tensor_parallel={tensor_parallel}",
        "trainer.tokens_per_micro_batch=1024",
    )
    assert result.code == 0, result.out + result.err
    assert result.summary["heldout"]["greedy"] >= 0.90
    assert result.summary["staleness"]["max"] <= 1
    assert result.summary["weight_version"] == 50


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_experts_of_tensor_parallel_ranks_learn_to_sort(tmp_path, seed):
    result = train(
        SORT4,
        tmp_path,
        f"seed={seed}",
        "model.path=tiny:qwen3_moe-0.7m",
        "trainer.world_size=4",
        "trainer.tensor_parallel=2",
        "trainer.expert_parallel=2",
    )
    assert result.code == 0, result.out + result.err
    assert result.summary["heldout"]["greedy"] >= 0.90
    assert result.summary["staleness"]["max"] <= 1
