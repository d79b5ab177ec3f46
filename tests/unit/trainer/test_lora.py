"""LoRA: only adapters train, and they are exported merged or separately."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.common.errors import DataLossError
from services.common.memory.trainer import trainer_memory
from services.common.models.loading import load_config, load_model, stored_tensors
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec, RunSpec
from services.common.runspec.trainer import LoraSpec
from services.extras.export.checkpoint import export_checkpoint
from services.rollout.frozen_weights import FrozenWeights
from services.trainer.engines.fsdp.build import fitted_to_gpu
from services.trainer.engines.fsdp.lora import add_adapters, begin_adapters
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.model.policy import Policy
from services.trainer.ranks.build import build_rank
from services.trainer.settings import TrainerSettings
from services.weightsync.adapters import frozen_digest
from services.weightsync.group import Channel, Work
from services.weightsync.member import WeightMember
from services.weightsync.modes.placing import Placer, whole_buffers
from services.weightsync.transfer import TransferRequest
from services.weightsync.weight_plan import version_digest
from services.wire.step_command import StepCommand
from tests.helpers.batches import CPU, policy_of, random_queue, rank_of, spec_of
from tests.helpers.weight_members import MemoryStore

SPEC = spec_of(trainer={"lora": {"rank": 4}, "optimizer": {"learning_rate": 0.01}})


def test_merged_weights_are_the_trained_policy(tmp_path: Path) -> None:
    assert SPEC.trainer.lora is not None
    policy = policy_of(SPEC)
    queue = random_queue(policy)
    plain = [
        (spec.name, spec.shape) for spec in WeightExport(policy, dtype=torch.float32).weight_specs()
    ]
    frozen = policy.model.get_input_embeddings().weight.clone()
    add_adapters(policy.model, SPEC.trainer.lora)
    rank = rank_of(SPEC, policy, queue, root=tmp_path / "checkpoints")
    rank.train(StepCommand(1, queue.meta))
    rank.train(StepCommand(2, queue.meta))
    assert torch.equal(policy.model.get_input_embeddings().weight, frozen)
    export = WeightExport(policy, dtype=torch.float32)
    assert [(spec.name, spec.shape) for spec in export.weight_specs()] == plain
    merged = policy_of(SPEC)
    merged.model.load_state_dict(dict(export.weight_tensors()), strict=False)
    ids = torch.tensor([[2, 3, 4, 5]])
    for model in (policy.model, merged.model):
        model.set_attn_implementation("sdpa")
    expected = policy.model(ids).logits
    torch.testing.assert_close(merged.model(ids).logits, expected, rtol=1e-4, atol=1e-4)

    folder = rank.checkpointer.write(rank.snapshot(2))
    export_checkpoint(folder, SPEC, tmp_path / "hf")
    elsewhere = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(elsewhere(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == 1


def test_initial_adapters_depend_only_on_the_seed() -> None:
    assert SPEC.trainer.lora is not None

    def begun(seed: int) -> dict[str, torch.Tensor]:
        policy = policy_of(SPEC)
        add_adapters(policy.model, SPEC.trainer.lora)
        begin_adapters(policy, seed=seed)
        return {n: v for n, v in policy.named_parameters() if v.requires_grad}

    first, again, other = begun(1), begun(1), begun(2)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    for name, value in first.items():
        assert torch.equal(value, other[name]) == ("lora_B" in name), name


class Sink:
    """Sink of weight sync that merges received adapters into separate weights and stores the result."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        model = ModelSpec(path=str(folder))
        self.frozen = FrozenWeights(
            model,
            load_config(model, load_tokenizer(model)),
            dtype=dtype,
            device=CPU,
            bucket_bytes=1 << 16,
        )
        self.live: dict[str, torch.Tensor] = {}

    async def adopt_weights(self, version, tensors):
        self.frozen.check(tensors)
        flat, live = whole_buffers(self.frozen.plan, [CPU])
        self.frozen.merge_ahead(tensors)
        self.frozen.write(tensors, Placer(self.frozen.plan, flat))
        copied = self.frozen.merged(tensors)
        assert all(torch.equal(value, live[name]) for name, value in copied.items())
        self.live = {name: tensor.clone() for name, tensor in live.items()}
        return 0.0


class Pair:
    """Trainer that sends only adapters, and a rollout that receives them."""

    def __init__(self, mode: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.policy = policy_of(SPEC)
        model = self.policy.model
        model.save_pretrained(folder)
        load_tokenizer(SPEC.model).save(folder)
        # Alpha is not a multiple of the rank, so the scale is not a power of two.
        add_adapters(model, LoraSpec(rank=4, alpha=5.0))
        for parameter in self.policy.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        self.dtype = dtype
        self.export = WeightExport(self.policy, dtype=dtype, sends_adapters=True)
        self.sink, self._mode, store = Sink(folder, dtype), mode, MemoryStore()
        self._members = [
            WeightMember(**side, device=CPU, host="127.0.0.1", rendezvous=lambda _: store)
            for side in ({"source": self.export}, {"sink": self.sink})
        ]

    @property
    def sender(self) -> WeightMember:
        return self._members[0]

    def train(self) -> None:
        """Changes the adapters, as a train step does."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter))

    async def form(self) -> None:
        (self.plan_hash,) = {
            member.agree_plan(self.export.weight_specs(), 1 << 18, source=source, mode=self._mode)
            for source, member in zip((0, None), self._members, strict=True)
        }
        await asyncio.gather(
            *(
                member.form_group(
                    1, receiver=0, num_receivers=1, backend="gloo", scope="s", timeout_s=30
                )
                for member in self._members
            )
        )

    async def transfer(self, version: int) -> list:
        versions = [await member.prepare(1, version, self.plan_hash) for member in self._members]
        base = versions[0] if versions[0] == versions[1] else -1
        request = TransferRequest(epoch=1, version=version, timeout_s=30, base_version=base)
        return await asyncio.gather(
            *(member.transfer(request) for member in self._members), return_exceptions=True
        )

    async def publish(self, version: int) -> int:
        """Publishes the weights and returns the number of sent bytes."""
        report, received = await self.transfer(version)
        assert report.digests == received.digests
        assert report.num_bytes == received.num_bytes
        await self._members[1].adopt(version, version_digest(report.digests))
        return report.num_bytes


@pytest.mark.parametrize("mode", ["shadow", "cpu_async", "delta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_adapters_that_travel_alone_arrive_merged_bit_by_bit(
    mode: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pair = Pair(mode, tmp_path, dtype)
    await pair.form()
    for version in range(3):
        pair.train()
        num_bytes = await pair.publish(version)
        merged = dict(WeightExport(pair.policy, dtype=dtype).weight_tensors())
        assert pair.sink.live.keys() == merged.keys()
        assert all(torch.equal(pair.sink.live[name], value) for name, value in merged.items())
        changed = pair.policy.model.get_submodule("model.layers.0.self_attn.q_proj.base_layer")
        assert not torch.equal(merged["model.layers.0.self_attn.q_proj.weight"], changed.weight)
        if mode == "shadow":
            weights = sum(value.nbytes for value in merged.values())
            assert num_bytes < weights / (5 if dtype == torch.bfloat16 else 10)


async def test_other_frozen_weights_than_the_trainers_are_refused(tmp_path: Path) -> None:
    pair = Pair("shadow", tmp_path)
    await pair.form()
    other = pair.sink.frozen._tensors["model.norm.weight"]
    other[0] += 1
    pair.sink.frozen._digest = frozen_digest(pair.sink.frozen._tensors.items())
    with pytest.raises(ValueError, match=r"trainer\.lora\.sync"):
        await pair.publish(0)


async def test_a_flipped_bit_of_an_adapter_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair = Pair("shadow", tmp_path)
    await pair.form()
    await pair.publish(0)
    pair.train()
    honest = Channel.broadcast
    source_channel = pair.sender._epochs.group(1).channels[0]

    def broadcast(channel: Channel, tensor: torch.Tensor) -> Work:
        if channel is source_channel and tensor.numel() >= 1024:
            tensor = tensor.clone()
            tensor[700] ^= 1
        return honest(channel, tensor)

    monkeypatch.setattr(Channel, "broadcast", broadcast)
    _, received = await pair.transfer(1)
    assert isinstance(received, DataLossError)


@pytest.mark.parametrize("name", ["nothing", "embed_tokens", "lm_head", "mlp", "input_layernorm"])
def test_target_modules_that_can_have_no_adapter_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"trainer\.lora\.target_modules has {name}"):
        add_adapters(policy_of(SPEC).model, LoraSpec(target_modules=("q_proj", name)))


def test_a_rank_holds_frozen_weights_in_the_dtype_that_it_computes_in_and_nothing_twice(
    tmp_path: Path,
) -> None:
    spec = spec_of(
        model={"path": str(_folder(tmp_path)), "tokenizer": None},
        trainer={"lora": {"rank": 4}, "dtype": "bfloat16"},
    )
    settings = TrainerSettings(
        controller_address="127.0.0.1:1",
        run_id="r",
        worker_id="trainer-0",
        state_directory=tmp_path,
    )
    nothing: Any = SimpleNamespace(fetch=None, store_records=None)
    built = build_rank(spec, settings, transfers=nothing, progress=lambda *_: None)
    try:
        engine: Any = built.rank.runner.engine
        parameters = list(engine.module.parameters())
        assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
        assert {p.dtype for p in parameters if not p.requires_grad} == {torch.bfloat16}
        # FSDP2 does not manage frozen weights, because it would gather them into additional memory.
        assert all(isinstance(p, DTensor) == p.requires_grad for p in parameters)
        config = load_config(spec.model, load_tokenizer(spec.model))
        parts = trainer_memory(fitted_to_gpu(spec, settings, device=CPU), config, gpu_bytes=10**12)
        trained = [p for p in parameters if p.requires_grad]
        frozen = [p for p in parameters if not p.requires_grad]
        assert parts.parts["weights, float32"] == 4 * sum(p.numel() for p in trained)
        assert parts.parts["weights, frozen"] == sum(p.nbytes for p in frozen)
        sent_bytes = sum(value.nbytes for _, value in engine.export_weights())
        assert parts.parts["weights in transfer"] == sent_bytes - 32
    finally:
        distributed.destroy_process_group()


def test_a_checkpoint_of_adapters_resumes_and_is_exported(
    tmp_path: Path,
) -> None:
    folder = _folder(tmp_path)
    lora = {"rank": 4, "alpha": 5.0}
    spec = spec_of(
        model={"path": str(folder), "tokenizer": None},
        trainer={"lora": lora, "optimizer": {"learning_rate": 0.01}},
    )
    policy = _adapted(spec)
    queue = random_queue(policy)
    rank = rank_of(spec, policy, queue, root=tmp_path / "checkpoints")
    rank.train(StepCommand(1, queue.meta))
    saved = rank.checkpointer.write(rank.snapshot(1))
    names = set(HuggingFaceStorageReader(str(saved)).read_metadata().state_dict_metadata)
    assert names
    assert all("lora_" in name for name in names)

    again = _adapted(spec)
    resumed = rank_of(spec, again, queue, root=tmp_path / "checkpoints")
    assert resumed.restore() == 1
    rank.train(StepCommand(2, queue.meta))
    resumed.train(StepCommand(2, queue.meta))
    pairs = zip(policy.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(parameter, other) for parameter, other in pairs)

    saved = rank.checkpointer.write(rank.snapshot(2))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    export_checkpoint(saved, spec, tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    # A run that starts from the export has the same stop tokens.
    assert load_tokenizer(ModelSpec(path=str(tmp_path / "hf"))).stop_ids == {1, 7}
    merged = dict(WeightExport(policy, dtype=torch.float32).weight_tensors())
    tensors = stored_tensors(exported)
    assert all(torch.equal(tensors[name], value) for name, value in merged.items())


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    policy_of(SPEC).model.save_pretrained(folder)
    load_tokenizer(SPEC.model).save(folder)
    return folder


def _adapted(spec: RunSpec) -> Policy:
    model = load_model(spec.model, load_tokenizer(spec.model), dtype=torch.float32, device=CPU)
    policy = Policy(model, temperature=1.0)
    assert spec.trainer.lora is not None
    add_adapters(model, spec.trainer.lora)
    begin_adapters(policy, seed=0)
    return policy
