"""Each rank loads only its rows of a model."""

from pathlib import Path

import pytest
import torch
from torch import distributed
from transformers import AutoConfig

from services.common.models.configs import preset_config
from services.common.models.loading import build_model, load_folder
from services.common.models.quantization import BaseDtype, is_quantized, rounded
from services.common.runspec.run import RunSpec
from services.trainer.batch.packing import pack
from services.trainer.engines.fsdp.build import Loader, load_policy
from services.trainer.engines.fsdp.parallel import build_topology
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.model.policy import Critic, Policy
from services.trainer.settings import TrainerSettings
from services.wire.data.jagged import Jagged
from tests.helpers.batches import CPU, spec_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)


def _peak_mib() -> int:
    """Returns the peak resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def _load(rank: int, folder: str, spec_json: str) -> None:
    spec, root = RunSpec.model_validate_json(spec_json), Path(folder)
    distributed.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=rank, world_size=spec.trainer.world_size
    )
    topology = build_topology(
        spec.trainer, device=CPU, rank=rank, world_size=spec.trainer.world_size
    )
    settings = TrainerSettings(
        run_id="run", worker_id="trainer-0", controller_address="127.0.0.1:1", model_cache=root
    )
    loader = Loader(spec, settings, topology, lambda step, steps: None)
    before = _peak_mib()
    policy = load_policy(loader, spec)
    risen = _peak_mib() - before
    weights = dict(WeightExport(policy, dtype=torch.float32).weight_tensors())
    critic = loader.load(Critic)
    assert not critic.head.weight.full_tensor().any()
    if rank == 0:
        torch.save({"weights": weights, "risen": risen}, root / "loaded.pt")
    distributed.destroy_process_group()


def _loaded(folder: Path, spec: RunSpec) -> tuple[dict[str, torch.Tensor], int]:
    run_ranks(_load, str(folder), spec.model_dump_json(), count=spec.trainer.world_size)
    content = torch.load(folder / "loaded.pt", weights_only=True)
    return content["weights"], content["risen"]


def _saved_model(folder: Path, preset: str, **shape: int) -> float:
    """Writes a random model in half precision; returns its size in single precision in MiB."""
    values = preset_config(preset, vocab_size=20, eos_id=1, pad_id=0) | shape
    model = build_model(AutoConfig.for_model(**values), dtype=torch.bfloat16, device=CPU, seed=3)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**20


def _assert_whole(weights: dict[str, torch.Tensor], folder: Path) -> None:
    policy = Policy(load_folder(folder, dtype=torch.float32, device=CPU), temperature=1.0)
    expected = dict(WeightExport(policy, dtype=torch.float32).weight_tensors())
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_the_rows_of_all_ranks_are_the_model_and_adapters_begin_as_nothing(tmp_path: Path) -> None:
    _saved_model(tmp_path / "model", "tiny:qwen2-0.4m")
    trainer = {"world_size": 2, "lora": {"rank": 2}}
    weights, _ = _loaded(
        tmp_path, spec_of(model={"path": str(tmp_path / "model")}, trainer=trainer)
    )
    _assert_whole(weights, tmp_path / "model")


def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    size_mib = _saved_model(tmp_path / "model", "tiny:qwen3-0.4m", **shape)
    trainer = {"world_size": 4, "tensor_parallel": 2}
    weights, risen_mib = _loaded(
        tmp_path, spec_of(model={"path": str(tmp_path / "model")}, trainer=trainer)
    )
    _assert_whole(weights, tmp_path / "model")
    assert risen_mib < 0.8 * size_mib, f"{risen_mib} MiB for a model of {size_mib:.0f} MiB"


def _train_adapters(rank: int, folder: str, spec_json: str) -> None:
    spec, root = RunSpec.model_validate_json(spec_json), Path(folder)
    distributed.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=rank, world_size=spec.trainer.world_size
    )
    topology = build_topology(
        spec.trainer, device=CPU, rank=rank, world_size=spec.trainer.world_size
    )
    settings = TrainerSettings(
        run_id="run", worker_id="trainer-0", controller_address="127.0.0.1:1", model_cache=root
    )
    policy = load_policy(Loader(spec, settings, topology, lambda step, steps: None), spec)
    text = torch.arange(2, 18, dtype=torch.int32)
    packed = pack(Jagged.from_list([text[:4]]), Jagged.from_list([text[4:]]), device=CPU)
    logprobs, _ = policy(packed)
    logprobs.mean().backward()
    kinds = {(p.requires_grad, p.dtype, p.grad is None) for p in policy.parameters()}
    dtype = getattr(torch, spec.trainer.dtype)
    assert kinds == {(True, torch.float32, False), (False, dtype, True)}
    if rank == 0:
        torch.save(logprobs.detach(), root / "logprobs.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("stage", "base_dtype", "dtype"),
    [
        (1, None, "bfloat16"),
        (3, None, "bfloat16"),
        (1, "nf4", "bfloat16"),
        (3, None, "float16"),
        (1, "nf4", "float16"),
    ],
)
def test_ranks_shard_frozen_weights_with_adapters_of_another_dtype(
    tmp_path: Path, stage: int, base_dtype: BaseDtype | None, dtype: str
) -> None:
    _saved_model(tmp_path / "model", "tiny:qwen2-0.4m")
    lora = {"rank": 2, "base_dtype": base_dtype}
    trainer = {"world_size": 2, "zero_stage": stage, "dtype": dtype, "lora": lora}
    spec = spec_of(model={"path": str(tmp_path / "model")}, trainer=trainer)
    run_ranks(_train_adapters, str(tmp_path), spec.model_dump_json(), count=2)
    content = torch.load(tmp_path / "logprobs.pt", weights_only=True)
    policy = Policy(
        load_folder(tmp_path / "model", dtype=getattr(torch, dtype), device=CPU),
        temperature=1.0,
    )
    for name, value in policy.model.named_parameters() if base_dtype else ():
        if is_quantized(name, tuple(value.shape)):
            value.data = rounded(value.data, base_dtype)
    text = torch.arange(2, 18, dtype=torch.int32)
    packed = pack(Jagged.from_list([text[:4]]), Jagged.from_list([text[4:]]), device=CPU)
    torch.testing.assert_close(content, policy(packed)[0].detach(), rtol=0.02, atol=0.02)
