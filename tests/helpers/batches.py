"""Batches for trainer tests: a tiny policy samples its own responses; the queue is in memory."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import ModelSpec, RunSpec
from services.extras.replay.recorder import StepRecorder
from services.trainer.algorithm.centering import score_centering
from services.trainer.batch.packing import pack
from services.trainer.batch.prefixes import InputSpan
from services.trainer.checkpoint.checkpointer import Checkpointer
from services.trainer.collectives import Ranks
from services.trainer.engines.base import TrainEngine
from services.trainer.engines.fsdp.build import teach
from services.trainer.engines.fsdp.engine import FsdpEngine
from services.trainer.engines.fsdp.oom import OomLimits
from services.trainer.engines.fsdp.parallel import RankTopology
from services.trainer.model.policy import Critic, Policy, freeze
from services.trainer.ranks.rank import NO_PROFILES, Rank, StepProfiler
from services.trainer.steps.critic import CriticRunner
from services.trainer.steps.step import StepRunner
from services.wire.batch import BlobRef, FieldColumn, KVBatchMeta
from services.wire.data.jagged import Jagged
from services.wire.data.model_inputs import ModelInputs

CPU = torch.device("cpu")
SYMBOLS = "chars:0123456789+-=abcde"


def prompt_spans(
    prompts: Sequence[Sequence[int]], inputs: Sequence[ModelInputs]
) -> tuple[tuple[InputSpan, ...], ...]:
    """Returns the input spans of sequences in which only prompts have inputs."""
    return tuple(
        (InputSpan(0, len(prompt), model_inputs),) if model_inputs.digest else ()
        for prompt, model_inputs in zip(prompts, inputs, strict=True)
    )


def spec_of(
    *,
    model: Mapping[str, Any] | None = None,
    algorithm: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
    teacher: Mapping[str, Any] | None = None,
) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "test",
            "model": {"path": "tiny:qwen2-0.4m", "tokenizer": SYMBOLS, **(model or {})},
            "teacher": None if teacher is None else {"tokenizer": SYMBOLS, **teacher},
            "data": {"train": {"source": "jsonl", "path": "none.jsonl"}},
            "rollout": {
                "group_size": 4,
                "max_response_tokens": 16,
                "rewards": [{"name": "exact_match"}],
                **(rollout or {}),
            },
            "algorithm": {"max_staleness": 8, **(algorithm or {})},
            "trainer": {"steps": 10, "prompts_per_step": 4, **(trainer or {})},
        }
    )


def spec_for(*, model: str = "tiny:qwen2-0.4m", algorithm: Any = None, **trainer: Any) -> RunSpec:
    """Returns a specification without gradient clipping; keywords are keys of ``trainer``."""
    optimizer = {"max_grad_norm": 1e9}
    return spec_of(
        model={"path": model},
        algorithm=algorithm or {},
        trainer={"optimizer": optimizer, **trainer},
    )


_MODEL_KEYS = {*ModelSpec.model_fields}
"""Keys of a model; a teacher has more."""


@lru_cache(8)
def _model_of(model_json: str, seed: int) -> PreTrainedModel:
    """Returns a cached random model; copying it takes a third of the time of building one."""
    model = ModelSpec.model_validate_json(model_json)
    config = load_config(model, load_tokenizer(model))
    return build_model(config, dtype=torch.float32, device=CPU, seed=seed)


def policy_of(spec: RunSpec, *, seed: int = 0, scale: float = 3.0) -> Policy:
    """Returns a random policy; a larger ``scale`` moves it further from uniform."""
    model = deepcopy(_model_of(spec.model.model_dump_json(include=_MODEL_KEYS), seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return Policy(
        model,
        temperature=1.0,
        routing_replay=spec.rollout.routing_replay,
        distill=spec.distillation,
        centering=score_centering(spec),
    )


class Queue:
    """Fake transferqueue: samples in memory with the metadata that describes them."""

    def __init__(self, meta: KVBatchMeta, fields: Mapping[str, Jagged]) -> None:
        self.meta = meta
        self.fields = dict(fields)

    def fetch(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, Jagged]:
        rows = [self.meta.keys.index(key) for key in meta.keys]
        return {name: self.fields[name].select(rows) for name in fields}

    def without(self, *names: str) -> "Queue":
        return queue_of({k: v for k, v in self.fields.items() if k not in names}, self.meta.tags)

    def replaced(self, **fields: Jagged) -> "Queue":
        return queue_of({**self.fields, **fields}, self.meta.tags)


def queue_of(fields: Mapping[str, Jagged], tags: Mapping[str, Any]) -> Queue:
    num_keys = len(fields["prompt_ids"])
    columns = tuple(
        FieldColumn(
            name=name,
            dtype=str(field.values.dtype).removeprefix("torch."),
            row_rank=0 if field.is_scalar else 1,
            tail_shape=tuple(field.values.shape[1:]),
            lengths=tuple(field.lengths.tolist()),
            blob_indexes=(0,) * num_keys,
            offsets=(0,) * num_keys,
        )
        for name, field in fields.items()
    )
    keys = tuple(f"g{i}" for i in range(num_keys))
    blob = BlobRef(shard_id="s", blob_id=1, size_bytes=1, checksum=0)
    meta = KVBatchMeta(
        partition_id="run/train", keys=keys, fields=columns, blobs=(blob,), tags=dict(tags)
    )
    return Queue(meta, fields)


def with_experts(queue: Queue, policy: Policy) -> Queue:
    """Adds routed experts to samples: some differ from those that ``policy`` chooses, some are unknown."""
    prompts, responses = queue.fields["prompt_ids"], queue.fields["response_ids"]
    with torch.no_grad():
        policy(pack(prompts, responses, device=CPU))
    assert policy.routing is not None
    experts_by_layer = policy.routing._chosen
    experts = torch.stack([experts_by_layer[layer] for layer in sorted(experts_by_layer)], 1)
    experts[::2] = (experts[::2] + 1) % 8
    experts[::5] = 255
    lengths = prompts.lengths + responses.lengths - 1
    return queue.replaced(routed_experts=Jagged(experts.to(torch.uint8), lengths))


def random_queue(
    policy: Policy, *, num_groups: int = 4, group_size: int = 4, seed: int = 0, version: int = 0
) -> Queue:
    """Returns a queue of random tokens with ``policy``'s logprobs and random rewards."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(2, 20, (length,), generator=generator, dtype=torch.int32)

    count = num_groups * group_size
    prompts = [tokens(n) for n in lengths(1, 9, num_groups) for _ in range(group_size)]
    responses = [tokens(n) for n in lengths(1, 17, count)]
    prompt_ids, response_ids = Jagged.from_list(prompts), Jagged.from_list(responses)
    with torch.no_grad():
        logprobs, _ = policy(pack(prompt_ids, response_ids, device=CPU))
    runs = [torch.tensor([[version, len(row)]], dtype=torch.int32) for row in responses]
    mask = torch.rand(len(response_ids.values), generator=generator) > 0.1
    fields = {
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "response_mask": Jagged(mask, response_ids.lengths),
        "rollout_logprobs": Jagged(logprobs, response_ids.lengths),
        "version_runs": Jagged.from_list(runs),
        "rewards": Jagged.from_list(list(torch.rand(count, generator=generator))),
    }
    tags = {
        "group_id": tuple(f"group{i // group_size}" for i in range(count)),
        "finish_reason": ("stop",) * count,
        "greedy": (0,) * count,
    }
    return queue_of(fields, tags)


def engine_of(
    module: Policy | Critic,
    spec: RunSpec,
    *,
    topology: RankTopology | None = None,
    oom_limits: OomLimits | None = None,
) -> FsdpEngine:
    topology = topology or RankTopology(device=CPU, data=Ranks())
    return FsdpEngine(module, spec=spec, topology=topology, oom_limits=oom_limits)


def rank_of(
    spec: RunSpec,
    policy: Policy | TrainEngine,
    queue: Queue,
    *,
    topology: RankTopology | None = None,
    root: Path | None = None,
    profiler: StepProfiler = NO_PROFILES,
    reference: Policy | None = None,
    step_recorder: StepRecorder | None = None,
) -> Rank:
    """Returns a rank that trains a policy, by default with the fsdp engine."""
    engine = engine_of(policy, spec, topology=topology) if isinstance(policy, Policy) else policy
    limits = getattr(engine, "oom_limits", None)
    critic = None
    if spec.algorithm.advantage_kind.needs_critic:
        module = Critic(policy_of(spec).model)
        critic = CriticRunner(
            engine_of(module, spec, topology=topology, oom_limits=limits), spec=spec
        )
    frozen = None
    if reference is not None:
        frozen = engine_of(freeze(reference), spec, topology=topology, oom_limits=limits)
        if isinstance(engine, FsdpEngine):
            teach(engine.module, frozen, spec)
    runner = StepRunner(
        engine,
        reference=frozen,
        critic=critic,
        spec=spec,
    )
    checkpointer = Checkpointer(
        runner.trained(), root=root or Path("no-checkpoints"), keep=2, ranks=engine.ranks
    )
    return Rank(
        runner,
        fetch=queue.fetch,
        spec=spec,
        checkpointer=checkpointer,
        profiler=profiler,
        step_recorder=step_recorder,
    )
