"""A step reports its number of compilations; on a CPU nothing is compiled."""

from concurrent.futures import ThreadPoolExecutor

import torch

from services.trainer.engines.fsdp.activations import compiled
from services.trainer.engines.fsdp.build import fitted_to_gpu
from services.trainer.settings import TrainerSettings
from services.trainer.steps.report import StepAccumulator, num_compiled
from tests.helpers.batches import CPU, spec_of


def test_compilations_are_those_since_the_step_began() -> None:
    double = torch.compile(lambda values: values * 2, backend="eager", dynamic=True)
    double(torch.ones(3))
    early = StepAccumulator()
    double(torch.ones(5))
    assert num_compiled() == early.compiled_before
    with torch.no_grad():
        double(torch.ones(5))
    assert num_compiled() == early.compiled_before + 1


def test_layers_are_not_compiled_on_a_cpu() -> None:
    spec = spec_of(trainer={"compile": True})
    resolved = fitted_to_gpu(spec, TrainerSettings.model_construct(), device=CPU)
    assert spec.trainer.compile
    assert not resolved.trainer.compile


def test_layers_compile_in_any_thread_for_more_kinds_than_torch_allows_by_default() -> None:
    kinds = [f"kind {number}" for number in range(10)]
    double = compiled(lambda values, kind: values * 2 if kind else values)

    def run() -> int:
        before = num_compiled()
        for kind in kinds:
            double(torch.ones(3), kind)
        return num_compiled() - before

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == len(kinds)
