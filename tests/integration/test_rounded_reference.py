"""A reference with its own GPUs is the rounded base of the policy, as one in the trainer is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.checks.start.preflight import examined_here
from services.common.models.loading import build_model
from services.common.runspec.loader import SpecError
from services.common.runspec.run import RunSpec
from services.extras.scoring.worker import build_reference
from services.trainer.engines.base import EngineArgs, score_text
from services.trainer.engines.fsdp import build as fsdp
from services.trainer.settings import TrainerSettings
from tests.helpers.mixtures import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.specs import spec_with

pytestmark = pytest.mark.timeout(300)

_TEXT = [3, 5, 8, 4, 9, 7]


def _run(folder: Path, dtype: str | None = "nf4", **scoring: Any) -> RunSpec:
    config = tiny_config("qwen2", vocab_size=24, hidden_size=64, max_position_embeddings=4096)
    model = build_model(config, dtype=torch.float32, device=torch.device("cpu"), seed=3)
    model.save_pretrained(folder / "model")
    return spec_with(
        model={"path": str(folder / "model"), "tokenizer": "chars:0123456789"},
        algorithm={"kl": {"coefficient": 0.1}},
        trainer={"lora": {"rank": 4, "base_dtype": dtype}},
        topology={
            "task_groups": ["train", "ref_logp", "generate"],
            "ratios": [0.25, 0.5, 0.25],
            "gpus": 4,
            **scoring,
        },
    )


def _settings(folder: Path) -> TrainerSettings:
    return TrainerSettings(
        controller_address="unused",
        run_id="run",
        worker_id="ref-logp-0",
        device="cpu",
        state_directory=folder,
        model_cache=folder,
    )


def _compare(process: int, document: str, folder: str) -> None:
    spec, settings = RunSpec.model_validate_json(document), _settings(Path(folder))
    engine_args = EngineArgs(spec, settings, torch.device("cpu"), ["reference"])
    expected = score_text(fsdp.build(engine_args)["reference"], _TEXT)
    transfers: Any = _NoTransfers()
    apart = build_reference(spec, settings, transfers=transfers, progress=lambda activity: None)
    assert apart.scorer.score_text(_TEXT) == pytest.approx(expected, abs=1e-6)


class _NoTransfers:
    fetch = add = None


@pytest.mark.parametrize("dtype", [None, "nf4", "int8"])
def test_a_reference_apart_scores_what_the_trainers_does(tmp_path: Path, dtype: str | None) -> None:
    run_ranks(_compare, _run(tmp_path, dtype).model_dump_json(), str(tmp_path), count=1)


@pytest.mark.parametrize(
    ("scoring", "key"),
    [
        ({"tensor_parallel": 2}, "topology.scoring.tensor_parallel"),
        ({"cpu_offload": True}, "topology.scoring.cpu_offload"),
    ],
)
def test_a_layout_that_cannot_hold_rounded_weights_is_refused(
    tmp_path: Path, scoring: dict[str, Any], key: str
) -> None:
    with pytest.raises(SpecError, match=rf"trainer\.lora\.base_dtype nf4 .* {key}"):
        _run(tmp_path, scoring_ranks=2, scoring=scoring)


def test_ranks_of_a_rounded_reference_pass_the_checks(tmp_path: Path) -> None:
    spec = _run(tmp_path, scoring_ranks=2)
    problems = examined_here(spec, tries_functions=False, has_workers=False).problems
    assert not [problem for problem in problems if "base_dtype" in problem]
