"""Comparison of a run's requirements with this machine before the start."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from services.checks.start import machine
from services.checks.start.machine import (
    gpu_shortages,
    half_slowdown,
    machine_defaults,
    memory_problems,
    shared_gpus,
    slow_settings,
    unmet_requirements,
)
from services.checks.start.memory import run_memory
from services.checks.start.preflight import read_checked
from services.common.runspec.run import RunSpec, default_slots
from tests.helpers.specs import spec_with


def write_nvidia_smi(
    tool: Path, sizes: Sequence[tuple[int, int]], processes: Sequence[str] = ()
) -> None:
    """Writes a program that reports GPUs, given their total and free memory in MiB, and their processes."""
    gpus = [f"{n}, GPU-{n}, {total}, {free}" for n, (total, free) in enumerate(sizes)]
    lines = {"--query-gpu*": gpus, "--query-compute-apps*": processes}
    cases = "".join(
        f"{option}) {'; '.join(f'echo {shlex.quote(row)}' for row in rows) or ':'};;\n"
        for option, rows in lines.items()
    )
    tool.write_text(f"#!/bin/sh\ncase $1 in\n{cases}esac\n")
    tool.chmod(0o755)


def spec(**topology: str) -> RunSpec:
    return spec_with(topology=topology, trainer={"prompts_per_step": 8})


@pytest.mark.parametrize(
    ("gpus", "is_shared"), [("0", True), ("0,1", True), ("0,1,2", False), ("", False)]
)
def test_a_note_reports_workers_that_share_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: str, is_shared: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    note = shared_gpus(spec())
    assert bool(note) == is_shared
    assert ("rollout.replicas is 2" in note) == is_shared


@pytest.mark.parametrize(("gpus", "is_enough"), [("0", False), ("0,1", True)])
def test_a_mixed_run_needs_gpus_for_dedicated_rollouts(
    monkeypatch: pytest.MonkeyPatch, gpus: str, is_enough: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("CC", sys.executable)
    requirements = " ".join(unmet_requirements(spec(placement="mixed")))
    assert ("topology.placement" in requirements) is not is_enough


@pytest.mark.parametrize(
    ("gpus", "settings", "replicas"),
    [("0", {}, 1), ("0,1", {}, 1), ("0,1,2", {}, 2), ("", {}, 2), ("0", {"replicas": 2}, 2)],
)
def test_the_default_number_of_rollouts_fits_the_gpus(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpus: str,
    settings: dict[str, Any],
    replicas: int,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    data, file = tmp_path / "data.jsonl", tmp_path / "run.yaml"
    data.write_text(8 * (json.dumps({"prompt": "1+1", "answer": "2"}) + "\n"))
    document = spec().model_dump(mode="json", exclude_unset=True)
    document["data"]["train"]["path"] = str(data)
    document["rollout"] = {"rewards": document["rollout"]["rewards"], **settings}
    document["validation"] = {"every": 0}
    file.write_text(json.dumps(document))
    draft = read_checked(file)
    examined_spec = draft.examined.spec
    assert examined_spec is not None
    assert examined_spec.rollout.replicas == replicas
    # Derived settings follow: a single rollout has as many slots as both rollouts.
    assert examined_spec.rollout.max_running_samples == default_slots(
        examined_spec, max_staleness=examined_spec.algorithm.max_staleness, replicas=replicas
    )
    assert any("rollout.replicas" in note for note in draft.notes) == (
        not settings and gpus in {"0", "0,1"}
    )


@pytest.mark.parametrize(
    ("engine", "gpus", "is_met"), [("vllm", "", False), ("vllm", "0,1", True), ("torch", "", True)]
)
def test_vllm_needs_a_gpu_to_report_which_tokens_could_be_drawn(
    monkeypatch: pytest.MonkeyPatch, engine: str, gpus: str, is_met: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("CC", sys.executable)
    truncated_spec = spec_with(rollout={"engine": engine, "sampling": {"top_k": 8}})
    assert ("rollout.sampling.top_k" in " ".join(unmet_requirements(truncated_spec))) is not is_met


@pytest.mark.parametrize(
    ("rollout", "key"),
    [
        ({"reproducible": "batch_invariant"}, "rollout.reproducible"),
        ({"quantization": "fp8"}, "rollout.quantization"),
        ({"speculation": {"method": "ngram", "tokens": 2}}, "rollout.speculation"),
    ],
)
def test_what_an_engine_does_on_a_gpu_only_is_reported_before_the_start(
    monkeypatch: pytest.MonkeyPatch, rollout: dict[str, object], key: str
) -> None:
    monkeypatch.setenv("CC", sys.executable)
    demanding_spec = spec_with(rollout={"engine": "vllm", **rollout})
    for gpus, is_reported in (("", True), ("0,1", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        assert any(p.startswith(key) for p in unmet_requirements(demanding_spec)) is is_reported
    assert not any(p.startswith(key) for p in unmet_requirements(demanding_spec, has_workers=False))


def test_gpus_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert "no-such-compiler" in " ".join(unmet_requirements(spec()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not list(unmet_requirements(spec()))


@pytest.mark.parametrize(
    ("path", "trainer", "gpus", "message"),
    [
        ("org/model", {}, "0", "trainer.dtype: bfloat16"),
        ("org/model", {"dtype": "bfloat16"}, "0", "trainer.compile: true"),
        ("org/model", {"dtype": "bfloat16", "compile": True}, "0", ""),
        ("org/model", {}, "", ""),
        ("tiny:qwen2-0.4m", {"dtype": "bfloat16"}, "", "trainer.dtype is bfloat16"),
        ("tiny:qwen2-0.4m", {"dtype": "float16"}, "", "trainer.dtype is float16"),
        ("org/model", {"dtype": "float16"}, "0", "trainer.compile: true"),
        ("tiny:qwen2-0.4m", {"compile": True}, "", "trainer.compile is true"),
        ("tiny:qwen2-0.4m", {}, "0", ""),
    ],
)
def test_a_note_lists_slow_settings(
    monkeypatch: pytest.MonkeyPatch, path: str, trainer: dict[str, Any], gpus: str, message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    document = spec().model_dump(exclude_unset=True)
    document["model"]["path"] = path
    document["trainer"] |= trainer
    notes = slow_settings(RunSpec.model_validate(document), lambda dtype: 58.0)
    assert message in notes
    assert bool(notes) == bool(message)


def test_a_16_bit_dtype_on_a_cpu_that_computes_it_fast_is_not_worth_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = spec_with(trainer={"dtype": "bfloat16"})
    assert slow_settings(run, lambda dtype: 1.1) == ""
    assert half_slowdown("float16") > 0


@pytest.mark.parametrize(
    ("path", "gpus", "trainer", "dtype"),
    [
        ("org/model", "0,1,2", {}, "bfloat16"),
        ("org/model", "0,1,2", {"dtype": "float32"}, "float32"),
        ("org/model", "", {}, "float32"),
        ("tiny:qwen2-0.4m", "0,1,2", {}, "float32"),
    ],
)
def test_the_dtype_that_is_not_given_follows_the_machine(
    monkeypatch: pytest.MonkeyPatch, path: str, gpus: str, trainer: dict[str, Any], dtype: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    run = spec_with(model={"path": path}, trainer=trainer)
    left_out = {"trainer.dtype"} - {f"trainer.{key}" for key in trainer}
    defaults = {
        machine_default.key: machine_default.value
        for machine_default in machine_defaults(run, left_out)
    }
    assert defaults.get("trainer.dtype", run.trainer.dtype) == dtype


@pytest.mark.parametrize(("host_gb", "is_refused"), [(10, True), (100, False)])
def test_a_model_that_this_machine_cannot_hold_is_rejected(
    monkeypatch: pytest.MonkeyPatch, host_gb: int, is_refused: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(machine, "host_bytes_here", lambda: host_gb * 10**9)
    # 1.0e9 weights need 16 bytes each in the trainer, and 4 bytes each in both rollouts.
    config = Qwen2Config(
        vocab_size=1000, hidden_size=2048, num_hidden_layers=20, intermediate_size=6000,
        num_attention_heads=16, num_key_value_heads=16,
    )  # fmt: skip
    problems = [*memory_problems(spec_with(model={"path": "org/model"}), config)]
    assert [problem.startswith("model.path") for problem in problems] == [True] * is_refused


@pytest.mark.parametrize("mebibytes", [24_576, 40_960, 81_559])
@pytest.mark.parametrize("tokens", [1024, 262_144])
def test_the_start_of_a_run_and_the_memory_plan_give_one_answer(
    monkeypatch: pytest.MonkeyPatch, mebibytes: int, tokens: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr(machine, "gpu_bytes_here", lambda: mebibytes << 20)
    run = spec_with(model={"path": "org/model"}, trainer={"tokens_per_micro_batch": tokens})
    config = Qwen2Config(vocab_size=1000, hidden_size=2048, num_hidden_layers=20)
    planned = run_memory(run, config, gpu_bytes=mebibytes << 20, gpus=3)
    assert bool([*memory_problems(run, config)]) == bool(planned.why_not)


def test_a_model_that_its_gpu_cannot_hold_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("PATH", str(tmp_path))
    run = spec_with(model={"path": "org/model"})
    config = Qwen2Config(vocab_size=1000, hidden_size=2048, num_hidden_layers=20)
    assert not [*memory_problems(run, config)], "its size is unknown"
    for mebibytes, is_refused in ((16384, True), (81559, False)):
        tool = tmp_path / "nvidia-smi"
        write_nvidia_smi(tool, [(mebibytes, mebibytes)] * 2)
        assert bool([*memory_problems(run, config)]) is is_refused


@pytest.mark.parametrize(
    ("free", "settings", "is_refused"),
    [
        ((81_000, 81_000), {}, False),
        ((81_000, 20_000), {}, True),
        ((20_000, 81_000), {}, True),
        ((81_000, 60_000), {"engine_arguments": {"gpu_memory_utilization": 0.5}}, False),
        ((81_000, 30_000), {"engine_arguments": {"gpu_memory_utilization": 0.5}}, True),
    ],
    ids=[
        "free",
        "rollout's held",
        "trainer's held",
        "a smaller engine",
        "held beside a smaller engine",
    ],
)
def test_a_run_is_refused_if_another_program_holds_its_gpus(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    free: Sequence[int],
    settings: dict[str, Any],
    is_refused: bool,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", str(tmp_path))
    processes = [
        f"GPU-{n}, {os.getppid()}, /usr/bin/other, 61000" for n in range(2) if free[n] < 81_000
    ]
    write_nvidia_smi(tmp_path / "nvidia-smi", [(81_559, size) for size in free], processes)
    run = spec_with(
        model={"path": "org/model"}, rollout={"engine": "vllm", "replicas": 1, **settings}
    )
    config = Qwen2Config(
        vocab_size=1000, hidden_size=2048, num_hidden_layers=20, num_attention_heads=16,
        num_key_value_heads=16,
    )  # fmt: skip
    problems = [*gpu_shortages(run, config)]
    assert bool(problems) == is_refused
    if is_refused:
        assert f"other (pid {os.getppid()} of " in problems[0]
        assert f"GPU {[*free].index(min(free))} " in problems[0]


def test_gpus_without_a_report_of_their_memory_are_not_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not [*gpu_shortages(spec_with(model={"path": "org/model"}), Qwen2Config())]
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    tool.chmod(0o755)
    assert not [*gpu_shortages(spec_with(model={"path": "org/model"}), Qwen2Config())]
