"""Tests of the checks of a run's engine arguments before an engine starts."""

from typing import Any

import pytest

from services.common.runspec.engines import ENGINES


@pytest.mark.parametrize(
    ("engine", "arguments", "gpus"),
    [
        ("torch", {}, 1),
        ("vllm", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
        ("vllm", {"data_parallel_size": 4, "enable_expert_parallel": True}, 4),
        ("vllm", {"tensor_parallel_size": 2, "data_parallel_size": 4}, 8),
        ("sglang", {"tp_size": 4, "pp_size": 2}, 8),
        ("sglang", {"tp_size": 8, "dp_size": 4, "enable_dp_attention": True, "ep_size": 8}, 8),
        ("sglang", {"tp_size": 2, "dp_size": 2}, 4),
    ],
)
def test_every_kind_of_parallelism_takes_gpus(
    engine: str, arguments: dict[str, Any], gpus: int
) -> None:
    assert ENGINES[engine].num_gpus(arguments) == gpus


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        ("torch", {"kv": 1}, r"\['kv'\].*max_kv_tokens"),
        ("fake", {"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ("vllm", {"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ("vllm", {"max_num_seqs": 8}, "rollout.max_running_samples"),
        ("vllm", {"load_format": "auto"}, "load_format"),
        ("vllm", {"max_model_len": 500}, "max_model_len"),
        ("sglang", {"context_length": 999}, "context_length"),
    ],
)
def test_engine_arguments_that_contradict_the_run_are_rejected_by_name(
    engine: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ENGINES[engine].check(arguments, most_tokens=1000)
