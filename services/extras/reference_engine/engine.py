"""Training engine of plain transformers: one process, one sequence at a time, no packing and no sharding.

It is the oracle of numerics, because it shares no computation with other engines. It also trains, slowly
(``trainer.engine: reference``). Its checkpoints have the tensors and names of the fsdp engine's.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from services.common.errors import DataLossError
from services.common.fields import ALL_TOKENS
from services.common.models.loading import stored_tensors
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.formulas import DistillArguments
from services.common.runspec.run import RunSpec
from services.trainer.algorithm.centering import score_centering
from services.trainer.algorithm.divergence import divergence
from services.trainer.algorithm.logprobs import bounded_logits
from services.trainer.batch.packing import Work
from services.trainer.batch.samples import Samples
from services.trainer.batch.step_plan import Bounds, StepPlan
from services.trainer.collectives import Ranks
from services.trainer.engines.base import (
    EngineArgs,
    LossT,
    Micros,
    ModelFacts,
    ModelRole,
    OptimizerStep,
    Passes,
    PendingSave,
    TrainEngine,
    WeightLayout,
)
from services.trainer.model.flops import active_weights
from services.trainer.model.policy import freeze_tower, output_head
from services.trainer.model.warm_start import load_base_model
from services.weightsync.weight_plan import TensorSpec
from services.wire.data.model_inputs import model_arguments

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FILE = "model.safetensors"


def build(
    args: EngineArgs, make: "type[ReferenceEngine] | None" = None
) -> dict[ModelRole, TrainEngine]:
    """Loads the models as engines of this class or a given one. Blocks.

    Raises:
        ValueError: If a model does not load.
    """
    engines: dict[ModelRole, ReferenceEngine] = {}
    for role in args.roles:
        spec = args.spec.of_reference if role == "reference" else args.spec
        model = load_base_model(
            spec.model,
            load_tokenizer(spec.model),
            seed=spec.seed,
            device=args.device,
            cache=args.settings.model_cache.expanduser(),
            progress=args.progress,
        )
        engines[role] = (make or ReferenceEngine)(model, args.spec, role=role)
    if "policy" in engines and "reference" in engines:
        engines["policy"].teacher = engines["reference"]
    return {**engines}


class _Model(nn.Module):
    """A causal language model, and the head of a critic. Its tensors have the names of a checkpoint."""

    def __init__(self, model: PreTrainedModel, *, has_head: bool) -> None:
        super().__init__()
        self.model = model
        self.head: nn.Linear | None = None
        if has_head:
            config: Any = model.config
            self.head = nn.Linear(config.hidden_size, 1, bias=False, device=model.device)
            nn.init.zeros_(self.head.weight)


class ReferenceEngine:
    """Implements :class:`~services.trainer.engines.base.TrainEngine`.

    Args:
        model: A Hugging Face causal language model in float32, on its device.
        role: Role of the model; a reference is frozen.
    """

    def __init__(self, model: PreTrainedModel, spec: RunSpec, *, role: ModelRole) -> None:
        self.ranks = Ranks()
        self.device = model.device
        self.model = ModelFacts(model.config, active_weights(model, model.config))
        self.bounds = Bounds(max_tokens=spec.trainer.tokens_per_micro_batch)
        is_reward_model = role == "policy" and spec.algorithm.loss_kind.trains_values
        has_head = role == "critic" or is_reward_model
        self.module = _Model(model, has_head=has_head)
        self.module.requires_grad_(role != "reference")
        freeze_tower(model, is_frozen=spec.trainer.freeze_vision_tower)
        self._temperature = spec.rollout.sampling.temperature
        self._distill = spec.distillation
        self._centering = score_centering(spec) if role == "policy" else None
        self.teacher = self
        """Engine of the teacher, if the loss compares the policy with one."""
        self._max_grad_norm = spec.trainer.optimizer.max_grad_norm
        named_parameters = [
            tensor for tensor in self.module.named_parameters() if tensor[1].requires_grad
        ]
        # Norms and biases do not decay; biases of fused experts have two dimensions.
        decayed = {
            name
            for name, tensor in named_parameters
            if tensor.ndim > 1 and not name.endswith("bias")
        }
        decay = spec.trainer.optimizer.weight_decay
        groups = [
            {
                "params": [tensor for name, tensor in named_parameters if name in decayed],
                "weight_decay": decay,
            },
            {
                "params": [tensor for name, tensor in named_parameters if name not in decayed],
                "weight_decay": 0.0,
            },
        ]
        if named_parameters:
            betas = spec.trainer.optimizer.betas
            self.optimizer = torch.optim.AdamW(groups, betas=betas)
            for _, parameter in named_parameters:  # every checkpoint holds the same tensors
                self.optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
                }

    @property
    def weights(self) -> WeightLayout:
        return WeightLayout(
            [
                TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
                for name, value in self.export_weights()
            ]
        )

    @torch.no_grad()
    def forward_logprobs(
        self,
        samples: Samples,
        plan: StepPlan,
        *,
        temperature: float | None = None,
        teaches: DistillArguments | None = None,
    ) -> Tensor:
        """Scores samples without gradients, one sequence after the other."""
        result: Tensor | None = None
        temperature = temperature or self._temperature
        for position in (
            sample_position
            for micros in plan.updates
            for micro in micros
            for sample_position in micro
        ):
            if teaches is None:
                predicted, *_ = self._sequence(samples, position, temperature)
            else:
                predicted = self._distribution(samples, position, temperature, teaches)
            if result is None:
                result = torch.zeros(len(samples.responses.values), *predicted.shape[1:])
            result[samples.places([position])] = predicted.cpu()
        return torch.zeros(0) if result is None else result

    def forward_backward(
        self,
        samples: Samples,
        micros: Micros,
        make_loss: Callable[[Micros], LossT],
        *,
        may_repeat: bool = True,
        loss_scale: float = 1.0,
    ) -> Passes[LossT]:
        """Adds the gradients of micro-batches; each micro-batch has one backward pass."""
        loss_of = make_loss(micros)
        passes = Passes(loss_of, micros, torch.zeros((), device=self.device), Work())
        for micro in filter(None, micros):
            sequence_values = [
                self._sequence(samples, position, self._temperature) for position in micro
            ]
            columns = [torch.cat(column) for column in zip(*sequence_values, strict=True)]
            loss = loss_of(samples.select(micro), *columns)
            (loss * loss_scale).backward()
            passes.loss += loss.detach()
            for position in micro:
                responses = int(samples.responses.lengths[position])
                length = int(samples.prompts.lengths[position]) + responses
                passes.work += Work(length, length, float(length) ** 2, responses)
        return passes

    def _sequence(self, samples: Samples, position: int, temperature: float) -> tuple[Tensor, ...]:
        """Returns ``[r]`` scores of a sequence's response; for a policy, also entropies and divergences."""
        predicted, response = self._predicted(samples, position)
        if self.module.head is not None:
            return (self.module.head(predicted).squeeze(-1).float(),)
        if samples.masks is not None:
            predicted = _limited(predicted, samples.masks.select([position]).values.tolist())
        logprobs = torch.log_softmax(predicted / temperature, dim=-1)
        entropy = -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)
        scores = logprobs.gather(1, response[:, None]).squeeze(1), entropy
        if samples.distributions is None:
            return scores
        taught = samples.distributions[samples.places([position])].to(self.device)
        if self._centering is not None:
            return *scores, self._centering(predicted / temperature, taught)
        if self._distill is None:
            return scores
        if self._distill.top_k is None:
            head = output_head(self.teacher.module.model)
            numbers = head.scale, head.cap, temperature
            logits, _ = bounded_logits(taught @ head.weight.detach().T, None, numbers)
            teacher_logprobs = torch.log_softmax(logits, dim=-1)
        else:
            logprobs, teacher_logprobs = _events(logprobs, taught[:, :-1, 0].long()), taught[..., 1]
        kind, beta = self._distill.divergence, self._distill.beta
        return *scores, divergence(logprobs, teacher_logprobs, kind=kind, beta=beta)

    def _distribution(
        self, samples: Samples, position: int, temperature: float, teaches: DistillArguments
    ) -> Tensor:
        """Returns a sequence's part of what :meth:`forward_logprobs` returns with ``teaches``."""
        predicted, _ = self._predicted(samples, position, has_logits=teaches.top_k is not None)
        if teaches.top_k is None:
            return predicted.float()
        logprobs = torch.log_softmax(predicted / temperature, dim=-1)
        ids = logprobs.topk(min(teaches.top_k, logprobs.shape[1])).indices
        id_column = functional.pad(ids.float(), (0, 1), value=-1.0)
        return torch.stack([id_column, _events(logprobs, ids)], -1)

    def _predicted(
        self, samples: Samples, position: int, *, has_logits: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns the ``[r, V]`` logits of a policy, or ``[r, H]`` states, and the response's tokens."""
        prompt = samples.prompts.select([position]).values.to(self.device, torch.int64)
        response = samples.responses.select([position]).values.to(self.device, torch.int64)
        tokens = torch.cat([prompt, response])[None]
        model: Any = self.module.model
        bundles = [span.inputs for span in samples.inputs[position]] if samples.inputs else []
        arguments = {
            "use_cache": False,
            **model_arguments(model.get_decoder(), bundles, self.device),
        }
        # The state before a token predicts it.
        predictors = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        if self.module.head is not None or not has_logits:
            states = model.get_decoder()(input_ids=tokens, **arguments).last_hidden_state
            return states[0, predictors], response
        return model(input_ids=tokens, **arguments).logits[0, predictors].float(), response

    def optimizer_step(
        self, learning_rate: float | None, *, scale: Tensor | None = None
    ) -> OptimizerStep:
        """Clips the accumulated gradients, updates the weights with them, and drops them."""
        grad_norm, is_updated = math.nan, False
        if learning_rate is not None:
            parameters = [
                trained for trained in self.module.parameters() if trained.grad is not None
            ]
            for parameter in parameters:
                if scale is not None and parameter.grad is not None:
                    parameter.grad *= scale
            grad_norm = float(nn.utils.clip_grad_norm_(parameters, self._max_grad_norm))
            is_updated = learning_rate > 0 and math.isfinite(grad_norm)
        if is_updated:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad()
        return OptimizerStep(grad_norm, moved=is_updated)

    def export_weights(self, *, rows: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, value in stored_tensors(self.module.model).items():
            yield name, value.detach()

    def save(self) -> PendingSave:
        tensors = {name: value.to("cpu", copy=True) for name, value in self._state().items()}

        def write(folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            contiguous = {name: value.contiguous() for name, value in tensors.items()}
            save_file(contiguous, folder / _FILE, metadata={"format": "pt"})

        return PendingSave(sum(value.nbytes for value in tensors.values()), write, tensors)

    def load(self, folder: Path, *, num_updates: int) -> None:
        """Loads weights and optimizer state in place.

        Raises:
            DataLossError: If tensors are missing or have other shapes: those of another model, or of several
                ranks.
        """
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        for name, value in self._state().items():
            if name not in tensors or tensors[name].shape != value.shape:
                raise DataLossError(
                    f"{folder} has no tensor {name} of the shape {list(value.shape)}; resume from a "
                    "checkpoint of the same model that one trainer process wrote",
                    folder=folder,
                )
            value.copy_(tensors[name])
        for state in self.optimizer.state.values():
            state["step"].fill_(float(num_updates))

    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, value in stored_tensors(self.module).items():
            state[name] = value.detach()
            if value.requires_grad:
                for moment in _MOMENTS:
                    state[f"optimizer.{moment}.{name}"] = self.optimizer.state[value][moment]
        return state

    def sleep(self) -> None:
        """Moves everything to host memory."""
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        """Moves everything back to the device."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        self.module.to(device)
        if hasattr(self, "optimizer"):
            for state in self.optimizer.state.values():
                state.update({moment: state[moment].to(device) for moment in _MOMENTS})


def _events(student: Tensor, ids: Tensor) -> Tensor:
    """Returns ``[r, K + 1]`` logprobs: of each of the ``K`` tokens ``ids``, and of all other tokens."""
    rest = student.scatter(1, ids, -1e30).logsumexp(-1, keepdim=True)
    return torch.cat([student.gather(1, ids), rest], -1)


def _limited(logits: Tensor, mask: list[int]) -> Tensor:
    """Returns ``[R, V]`` logits that are -inf for tokens that a sampling mask excludes."""
    row, excluded = -1, torch.zeros_like(logits, dtype=torch.bool)
    for entry in mask:
        row += entry < 0
        if entry < 0:
            excluded[row] = entry != ALL_TOKENS
        if entry != ALL_TOKENS:
            excluded[row, ~entry if entry < 0 else entry] = False
    return logits.masked_fill(excluded, -math.inf)
