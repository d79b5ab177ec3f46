"""Processes of the end-to-end measurement: trainer ranks and rollouts, each with its weight member."""

import asyncio
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.weightsync.shapes import SHAPES
from services.common.rpc.server import serve
from services.common.runspec.trainer import TrainerSpec
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.torch.engine import TorchEngine
from services.rollout.weights import WeightReceiver
from services.trainer.batch.samples import Samples
from services.trainer.batch.step_plan import Bounds, StepPlan
from services.trainer.engines.base import ModelFacts, WeightLayout
from services.trainer.engines.fsdp.engine import score_tokens
from services.trainer.engines.fsdp.oom import OomLimits
from services.trainer.engines.fsdp.parallel import build_topology, distribute
from services.trainer.engines.fsdp.weights import WeightExport
from services.trainer.model.policy import Policy
from services.trainer.ranks.command_group import Command, CommandGroup, CommandKind
from services.trainer.ranks.follower import Follower
from services.trainer.ranks.leader import Leader
from services.weightsync.member import WeightMember
from services.weightsync.server import WeightSyncServicer
from services.wire.controller import open_rendezvous
from slipstream.weightsync.v1 import weightsync_pb2_grpc


class _UntrainedRank:
    """A rank that exports and scores weights and trains nothing.

    It is its own engine, because an engine's optimizer would take memory.
    """

    def __init__(self, policy: Policy, export: WeightExport, device: torch.device) -> None:
        self._policy = policy
        self._export = export
        self._device = device
        self.model = ModelFacts(policy.model.config, 1.0)
        self.runner = SimpleNamespace(engine=self)
        self.weights = WeightLayout(export.weight_specs(), export.sends_rows)

    def check_awake(self) -> None:
        """Does nothing."""

    def export_weights(self, *, rows: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights."""
        return self._export.weight_rows() if rows else self._export.weight_tensors()

    def forward_logprobs(
        self, samples: Samples, plan: StepPlan, *, temperature: float
    ) -> torch.Tensor:
        """Scores the canary."""
        return score_tokens(
            self._policy,
            lambda packed: self._policy(packed, temperature=temperature)[0],
            samples,
            plan,
            device=self._device,
            shares_prefixes=False,
            oom_limits=OomLimits(Bounds()),
        )


def run_trainer_rank(rank: int, options: Any, controller: str, port: int, members: Any) -> None:
    """Runs one trainer rank: its weights change on command and are sent when the controller requests it."""
    device = _device(options, rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if options.trainers > 1:
        # A separate store, because a blocked wait for a key blocks other users of the connection.
        trainer_store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if options.use_gpu else "gloo",
            store=dist.PrefixStore("trainer", trainer_store),
            rank=rank,
            world_size=options.trainers,
        )
    spec = TrainerSpec(
        steps=1, prompts_per_step=1, world_size=options.trainers, dtype=options.dtype
    )
    topology = build_topology(spec, device=device, rank=rank, world_size=options.trainers)
    policy = Policy(_model(options, torch.float32, device), temperature=1.0)
    distribute(policy, spec, topology)
    weights = WeightExport(policy, dtype=getattr(torch, options.dtype), senders=options.senders)
    command_group = CommandGroup(options.trainers)
    threading.Thread(
        target=_step_on_request,
        args=(policy, weights, command_group, rank, options, store),
        daemon=True,
    ).start()
    asyncio.run(_serve_rank(rank, command_group, policy, weights, device, controller, members))


async def _serve_rank(
    rank: int,
    command_group: CommandGroup,
    policy: Policy,
    weights: WeightExport,
    device: torch.device,
    controller: str,
    members: Any,
) -> None:
    source: Leader | Follower
    untrained = cast("Any", _UntrainedRank(policy, weights, device))
    if rank == 0:
        source = Leader()
        source.attach(untrained, command_group)
    else:
        source = Follower(command_group, untrained)
    async with _member(controller, device, source=source) as (member, port):
        addresses = await asyncio.to_thread(command_group.gather, f"127.0.0.1:{port}")
        if weights.sends_rows:
            member.source_addresses = addresses
        members.put((f"trainer-{rank}", port))
        if isinstance(source, Follower):
            await asyncio.to_thread(source.follow)
        await asyncio.Event().wait()


def run_rollout(number: int, options: Any, controller: str, port: int, members: Any) -> None:
    """Runs one rollout, which decodes all the time."""
    torch.set_num_threads(1)
    device = _device(options, options.trainers + number)
    model = _model(options, getattr(torch, options.dtype), device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    asyncio.run(_serve_rollout(number, options, model, controller, store, members))


async def _serve_rollout(
    number: int, options: Any, model: Any, controller: str, store: Any, members: Any
) -> None:
    engine = TorchEngine(model, max_running=options.requests, kv_policy="keep")
    receiver = WeightReceiver()
    receiver.attach(engine, cast("Any", _NothingUnfinished()), is_partial=True)
    joined = _member(controller, model.device, sink=receiver)
    async with joined as (_, port), asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        for index in range(options.requests):
            tasks.create_task(_decode_on(engine, f"{index}"))
        members.put((f"rollout-{number}", port))
        await asyncio.to_thread(store.wait, ["end"])
        tokens = engine.stats().tokens_total
        store.set(f"tokens/{number}", str(tokens))
        await engine.pause()
        digest = await asyncio.to_thread(_digest, model.named_parameters())
        store.set(f"digest/rollout-{number}", digest)
        await asyncio.Event().wait()


class _NothingUnfinished:
    """Replaces the sampler, which stores unfinished responses."""

    def checkpoint_soon(self) -> None:
        """Does nothing."""


async def _decode_on(engine: TorchEngine, name: str) -> None:
    number = 0
    while True:
        number += 1
        await engine.generate(
            GenerationRequest(
                request_id=f"{name}/{number}", context_ids=(1, 2, 3), max_tokens=256, seed=number
            )
        )


def _step_on_request(
    policy: Policy,
    weights: WeightExport,
    command_group: CommandGroup,
    rank: int,
    options: Any,
    store: Any,
) -> None:
    """Replaces the optimizer: changes every weight slightly on command."""
    _use(next(policy.parameters()).device)
    for version in range(options.rounds + options.warm_up):
        store.wait([f"step/{version}"])
        with torch.no_grad():
            for parameter in policy.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.mul_(1.0 + 1e-2 * (version % 3 - 1)).add_(1e-4)
        if options.use_gpu:
            torch.cuda.synchronize()
        store.set(f"stepped/{version}/{rank}", "1")
    store.wait(["end"])
    if rank == 0:
        command_group.broadcast(Command(CommandKind.GATHER))
        store.set("digest/trainer", _digest(weights.weight_tensors()))


def _digest(parameters: Iterator[tuple[str, torch.Tensor]] | Any) -> str:
    total = hashlib.sha256()
    for name, value in sorted((name, value.detach().cpu()) for name, value in parameters):
        total.update(
            name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return total.hexdigest()


@asynccontextmanager
async def _member(controller: str, device: torch.device, **side: Any) -> Any:
    async with open_rendezvous(controller) as rendezvous:
        member = WeightMember(**side, device=device, host="127.0.0.1", rendezvous=rendezvous)
        add = weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server
        async with serve(
            "127.0.0.1:0", lambda server: add(WeightSyncServicer(member), server)
        ) as port:
            yield member, port


def _model(options: Any, dtype: torch.dtype, device: torch.device) -> Any:
    shape = SHAPES[options.model]
    config = Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _device(options: Any, number: int) -> torch.device:
    # Each process sees one GPU, as in a run.
    os.environ["CUDA_VISIBLE_DEVICES"] = str(number)  # noqa: TID251
    device = torch.device("cuda", 0) if options.use_gpu else torch.device("cpu")
    _use(device)
    return device


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
