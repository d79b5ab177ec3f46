"""Tests of user-defined losses, advantages and training engines, as in docs/adding.md."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import distributed

from services.common.runspec.loader import SpecError, parse_spec
from services.common.runspec.run import RunSpec
from services.common.security.confinement import CodePolicy
from services.trainer.collectives import Ranks
from services.trainer.engines.base import EngineArgs, build_engines
from services.trainer.settings import TrainerSettings
from services.trainer.steps.credit import CreditAssigner
from services.trainer.steps.objective import Objective
from services.trainer.steps.updates import NotFiniteError
from services.wire.step_command import StepCommand
from tests.helpers.batches import policy_of, random_queue, rank_of, spec_of
from tests.helpers.packages import install_from
from tests.helpers.pages import example
from tests.unit.trainer import test_engines

PPO = {"loss": "ppo", "dual_clip": None, "clip_low": 0.2, "clip_high": 0.28}


def trained(algorithm: dict[str, Any]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Returns the metrics of the second step and the weights after it."""
    spec = spec_of(algorithm=algorithm)
    policy = policy_of(spec, scale=1.5)
    queue = random_queue(policy_of(spec, seed=1, scale=1.5))
    rank = rank_of(spec, policy, queue)
    rank.train(StepCommand(1, queue.meta))
    metrics = rank.train(StepCommand(2, queue.meta)).metrics
    return dict(metrics), dict(policy.state_dict())


def test_a_loss_of_the_users_own_trains_bit_for_bit_like_the_one_it_copies(tmp_path: Path) -> None:
    file = example("adding.md", "clipped.py", tmp_path)
    own_loss = {"loss": f"{file}:clipped", "loss_arguments": {"low": 0.2, "high": 0.28}}
    (metrics, weights), (expected, expected_weights) = trained(own_loss), trained(PPO)
    for name in ("loss", "grad_norm", "clip_fraction", "is_weight_mean"):
        assert metrics[name] == expected[name], name
    assert 0 < metrics["clip_fraction"] < 1
    assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())
    narrow, _ = trained({**own_loss, "loss_arguments": {"low": 0.01, "high": 0.01}})
    assert narrow["clip_fraction"] > metrics["clip_fraction"]


def test_an_advantage_of_the_users_own_is_the_one_it_copies(tmp_path: Path) -> None:
    file = example("adding.md", "centred.py", tmp_path)
    own_advantage = {"advantage": f"{file}:centred", "advantage_arguments": {"scale": 2.0}}
    (metrics, _), (expected, _) = trained(own_advantage), trained({"advantage": "dr_grpo"})
    assert expected["advantage_abs_mean"] > 0.1
    assert metrics["advantage_abs_mean"] == pytest.approx(2 * expected["advantage_abs_mean"])


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"loss": "pppo"}, ["algorithm.loss 'pppo'", "ppo", "module:function"]),
        ({"advantage": "a2c"}, ["algorithm.advantage 'a2c'", "gae", "module:function"]),
        ({"loss": "ppo", "loss_arguments": {"low": 1}}, ["loss_arguments", "low", "clip_low"]),
        (
            {"loss": "dppo", "loss_arguments": {"divergence": "js"}},
            ["loss_arguments.divergence", "js"],
        ),
        ({"loss": "kl_cov", "loss_arguments": {"fraction": 2}}, ["loss_arguments.fraction", "2"]),
        ({"advantage_arguments": {"length_adaptive": 0.05}}, ["advantage_arguments", "grpo"]),
    ],
)
def test_what_no_loss_or_advantage_is_called_is_refused(
    algorithm: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({**spec_of().model_dump(mode="json"), "algorithm": algorithm})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_loss_without_a_gradient_is_refused_before_a_step(tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text(
        "from services.trainer.algorithm.loss import TokenLoss\n"
        "def flat(tokens):\n    return TokenLoss(-tokens.advantages * tokens.logprobs.detach())\n"
    )
    spec = spec_of(algorithm={"loss": f"{tmp_path}/flat.py:flat"})
    with pytest.raises(ValueError, match=r"flat' has no gradient.*tokens\.logprobs"):
        Objective(spec.algorithm, correction="bypass", horizon=16)


def test_a_loss_that_does_not_take_its_arguments_is_refused_before_a_step(tmp_path: Path) -> None:
    file = example("adding.md", "clipped.py", tmp_path)
    spec = spec_of(algorithm={"loss": f"{file}:clipped", "loss_arguments": {"lower": 0.2}})
    with pytest.raises(ValueError, match=r"algorithm\.loss.*lower.*algorithm\.loss_arguments"):
        Objective(spec.algorithm, correction="bypass", horizon=16)
    missing_function = spec_of(algorithm={"advantage": "no_such_module:estimate"})
    with pytest.raises(ValueError, match=r"algorithm\.advantage.*no_such_module"):
        CreditAssigner(missing_function.algorithm, Ranks(), max_response_tokens=16)


def test_a_loss_with_a_wrong_result_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("def wrong(tokens):\n    return tokens.logprobs.mean()\n")
    with pytest.raises(ValueError, match=r"algorithm\.loss .*must return a TokenLoss"):
        trained({"loss": f"{file}:wrong"})
    other = tmp_path / "other.py"
    other.write_text("def other(batch):\n    return batch.rewards[:1]\n")
    with pytest.raises(ValueError, match=r"algorithm\.advantage .*one advantage for each"):
        trained({"advantage": f"{other}:other"})


FAULTY = """
import torch
from torch import distributed
from services.trainer.algorithm.loss import TokenLoss

def waits(given):
    distributed.all_reduce(torch.ones(1))
def breaks(given):
    return given.nothing
def nan_loss(tokens):
    return TokenLoss(tokens.logprobs / 0 * 0)
def later_nan(tokens):
    return TokenLoss(tokens.logprobs * (float("nan") if len(tokens.mask) > 1 else 1))
def nan_advantage(batch):
    return batch.rewards * float("nan")
"""


@pytest.mark.parametrize(
    ("key", "name", "reported"),
    [
        ("loss", "breaks", "failed: AttributeError.*'nothing'"),
        ("loss", "nan_loss", "is nan for one token"),
        ("advantage", "breaks", "failed: AttributeError.*'nothing'"),
        ("advantage", "nan_advantage", "is .*nan.* scores 0 and 1"),
    ],
)
def test_faulty_functions_are_reported_before_the_first_step(
    tmp_path: Path, key: str, name: str, reported: str
) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    spec = spec_of(algorithm={key: f"{file}:{name}"})
    with pytest.raises(ValueError, match=rf"algorithm\.{key} .*{name}.*{reported}"):
        rank_of(spec, policy_of(spec), random_queue(policy_of(spec)))


def test_a_number_that_is_not_finite_later_on_names_what_is_the_users(tmp_path: Path) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    spec = spec_of(algorithm={"loss": f"{file}:later_nan", "max_nonfinite_steps": 0})
    policy = policy_of(spec)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue, root=tmp_path)
    rank.checkpointer.write(rank.snapshot(1))
    assert rank.train(StepCommand(2, queue.meta)).metrics["rewound_to_step"] == 1
    with pytest.raises(
        NotFiniteError, match=r"algorithm\.loss '.*faulty\.py:later_nan' and the rewards"
    ):
        rank.train(StepCommand(2, queue.meta))


@pytest.mark.parametrize("key", ["loss", "advantage"])
def test_a_collective_in_a_users_function_is_refused(tmp_path: Path, key: str) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    spec = spec_of(algorithm={key: f"{file}:waits"})
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            ValueError, match=rf"algorithm\.{key} .*waits.*collective c10d\.allreduce"
        ):
            rank_of(spec, policy_of(spec), random_queue(policy_of(spec)))
    finally:
        distributed.destroy_process_group()


PARTED = """
def on_some(batch):
    return batch.whiten(batch.rewards) if len(batch.rewards) else batch.rewards
def twice_on_some(batch):
    values = batch.whiten(batch.rewards)
    return batch.whiten(values) if len(values) else values
def other_sizes(batch):
    return batch.rewards + batch.sum_over_ranks(batch.rewards).sum()
def hidden(batch):
    try:
        return on_some(batch)
    except Exception:
        return batch.rewards
def fails_on_some(batch):
    return batch.whiten(batch.rewards) if len(batch.rewards) else batch.nothing
def everywhere(batch):
    return batch.whiten(batch.rewards)
"""


class TwoRanks(Ranks):
    """Ranks in threads that wait for each other at each sum, as processes do."""

    def meet(self, barrier: threading.Barrier, reported: list[torch.Tensor]) -> "TwoRanks":
        object.__setattr__(self, "_meeting", (barrier, reported))
        return self

    def _reduce(self, values: torch.Tensor, operation: Any) -> torch.Tensor:
        barrier, reported = self._meeting  # type: ignore[attr-defined]
        reported[self.rank] = values.clone()
        barrier.wait()
        total: torch.Tensor = reported[0] + reported[1]
        barrier.wait()
        return total


def tried_on_two_ranks(spec: RunSpec) -> list[str]:
    """Returns the error that each of two ranks raises before the run."""
    barrier, reported = threading.Barrier(2, timeout=60), [torch.zeros(0)] * 2

    def said(rank: int) -> str:
        ranks = TwoRanks(rank=rank, size=2).meet(barrier, reported)
        try:
            CreditAssigner(spec.algorithm, ranks, max_response_tokens=16)
        except ValueError as error:
            return str(error)
        return "nothing"

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(said, range(2)))


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("on_some", ["calls batch.whiten or batch.sum_over_ranks on 1 of 2 ranks"] * 2),
        ("twice_on_some", ["calls batch.whiten or batch.sum_over_ranks on 1 of 2 ranks"] * 2),
        ("other_sizes", ["with 2 numbers on this rank", "with 0 numbers on this rank"]),
        ("hidden", ["calls batch.whiten or batch.sum_over_ranks on 1 of 2 ranks"] * 2),
        ("fails_on_some", ["failed on another rank", "failed: AttributeError"]),
        ("everywhere", ["nothing"] * 2),
    ],
)
def test_a_sum_on_some_ranks_only_fails_on_all_ranks(
    tmp_path: Path, name: str, reported: list[str]
) -> None:
    file = tmp_path / "parted.py"
    file.write_text(PARTED)
    spec = spec_of(algorithm={"advantage": f"{file}:{name}"})
    for message, words in zip(tried_on_two_ranks(spec), reported, strict=True):
        assert words in message
        assert words == "nothing" or f"algorithm.advantage '{file}:{name}'" in message


@pytest.mark.parametrize("key", ["loss", "advantage"])
def test_code_outside_of_the_allowed_folders_is_refused(key: str) -> None:
    allowance = CodePolicy(roots=(Path("/data"),), code_roots=(Path("/code"),))

    def refused(file: str) -> list[str]:
        spec = spec_of(algorithm={key: f"{file}:mine"})
        return [line for line in allowance.problems(spec) if line.startswith(f"algorithm.{key}:")]

    assert refused("/code/mine.py") == []
    assert "/data/mine.py" in refused("/data/mine.py")[0]


@pytest.fixture
def sgd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs the engine of docs/adding.md and returns its class."""
    for name in ("sgd.py", "sgd_kind.py"):
        example("adding.md", name, tmp_path)
    install_from(example("adding.md", "sgd.toml", tmp_path), monkeypatch)
    engine_class = resolve_name("sgd:SgdEngine")
    monkeypatch.setitem(
        test_engines.BUILD, "sgd", lambda model, role, spec: engine_class(model, spec, role=role)
    )
    return engine_class


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, test in vars(test_engines).items()
        if test_engines.each_engine.mark in getattr(test, "pytestmark", [])
    ],
)
def test_the_engine_of_the_page_keeps_the_contract(name: str, sgd: Any, tmp_path: Path) -> None:
    contract = getattr(test_engines, name)
    takes = inspect.signature(contract).parameters
    contract("sgd", **({"tmp_path": tmp_path} if "tmp_path" in takes else {}))


def test_a_run_may_name_the_engine_of_the_page(sgd: Any, tmp_path: Path) -> None:
    spec = spec_of(trainer={"engine": "sgd"})
    settings = TrainerSettings(
        controller_address="none", run_id="r", worker_id="t", state_directory=tmp_path
    )
    device = torch.device("cpu")
    engines = build_engines(EngineArgs(spec, settings, device, ["policy", "reference"]))
    assert all(isinstance(engine, sgd) for engine in engines.values())
    queue = random_queue(policy_of(spec, seed=1))
    rank = rank_of(spec, engines["policy"], queue)
    assert not rank.train(StepCommand(1, queue.meta)).skipped
