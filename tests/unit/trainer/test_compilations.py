"""Tests of the reported number of compilations of a step, which is 0 on a CPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._inductor import compile_fx

from services.trainer.engines.fsdp import build
from services.trainer.engines.fsdp.activations import compiled
from services.trainer.engines.fsdp.build import Loader, fitted_to_gpu, load_policy
from services.trainer.engines.fsdp.parallel import build_topology
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


def test_layers_compile_in_any_thread_for_more_kinds_than_torch_allows_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Dynamo counts and limits compilations; what Inductor compiles takes 20 s of CPU.
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, *_, **__: graph.forward)
    kinds = [f"kind {number}" for number in range(10)]
    double = compiled(lambda values, kind: values * 2 if kind else values)

    def run() -> int:
        before = num_compiled()
        for kind in kinds:
            assert double(torch.ones(3), kind).tolist() == [2.0] * 3
        return num_compiled() - before

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run).result() == len(kinds)


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_the_engine_waits_for_no_compilation_in_turns(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[object] = []
    monkeypatch.setattr(build, "compile_ahead", lambda policy, *_, **__: policies.append(policy))
    monkeypatch.setattr(build, "distribute", lambda *_: None)
    spec = spec_of(trainer={"compile": True})
    topology = spec.topology.model_copy(update={"placement": placement})
    spec = spec.model_copy(update={"topology": topology})
    settings = TrainerSettings(
        run_id="run", worker_id="trainer-0", controller_address="127.0.0.1:1", model_cache=tmp_path
    )
    ranks = build_topology(spec.trainer, device=CPU, rank=0, world_size=1)
    policy = load_policy(Loader(spec, settings, ranks, lambda _: None), spec)
    assert policies == ([policy] if placement == "disaggregated" else [])
