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
from transformers import PreTrainedModel

from services.common.errors import DataLossError
from services.common.models.loading import stored_tensors
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.run import RunSpec
from services.trainer.batch.packing import Work
from services.trainer.batch.plan import Bounds, StepPlan
from services.trainer.batch.samples import Samples
from services.trainer.collectives import Ranks
from services.trainer.engines.base import (
    EngineOrder,
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
from services.trainer.model.warm_start import load_base_model
from services.weightsync.plan import TensorSpec
from services.wire.data.model_inputs import model_arguments

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FILE = "model.safetensors"


def build(
    order: EngineOrder, make: "type[ReferenceEngine] | None" = None
) -> dict[ModelRole, TrainEngine]:
    """Loads the models as engines of this class or a given one. Blocks.

    Raises:
        ValueError: If a model does not load.
    """
    engines: dict[ModelRole, TrainEngine] = {}
    for role in order.roles:
        spec = order.spec.of_reference if role == "reference" else order.spec
        model = load_base_model(
            spec.model,
            load_tokenizer(spec.model),
            seed=spec.seed,
            device=order.device,
            cache=order.settings.model_cache.expanduser(),
            progress=order.progress,
        )
        engines[role] = (make or ReferenceEngine)(model, order.spec, role=role)
    return engines


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
        spec: The run.
        role: Role of the model; a reference is frozen.
    """

    def __init__(self, model: PreTrainedModel, spec: RunSpec, *, role: ModelRole) -> None:
        self.ranks = Ranks()
        self.device = model.device
        self.model = ModelFacts(model.config, active_weights(model, model.config))
        self.bounds = Bounds(max_tokens=spec.trainer.tokens_per_micro_batch)
        self.module = _Model(model, has_head=role == "critic")
        self.module.requires_grad_(role != "reference")
        self._temperature = spec.rollout.sampling.temperature
        self._max_grad_norm = spec.trainer.optimizer.max_grad_norm
        named = list(self.module.named_parameters()) if role != "reference" else []
        # Norms and biases do not decay; biases of fused experts have two dimensions.
        decayed = {name for name, each in named if each.ndim > 1 and not name.endswith("bias")}
        decay = spec.trainer.optimizer.weight_decay
        groups = [
            {"params": [each for name, each in named if name in decayed], "weight_decay": decay},
            {"params": [each for name, each in named if name not in decayed], "weight_decay": 0.0},
        ]
        if named:
            betas = spec.trainer.optimizer.betas
            self.optimizer = torch.optim.AdamW(groups, betas=betas)
            for _, parameter in named:  # every checkpoint holds the same tensors
                self.optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
                }

    @property
    def weights(self) -> WeightLayout:
        """Layout of the exported weights."""
        return WeightLayout(
            [
                TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
                for name, value in self.export_weights()
            ]
        )

    @torch.no_grad()
    def forward_logprobs(
        self, samples: Samples, plan: StepPlan, *, temperature: float | None = None
    ) -> Tensor:
        """Scores samples without gradients, one sequence after the other."""
        result = torch.zeros(len(samples.responses.values))
        for micros in plan.updates:
            for micro in micros:
                for position in micro:
                    scores, _ = self._sequence(samples, position, temperature or self._temperature)
                    result[samples.places([position])] = scores.cpu()
        return result

    def forward_backward(
        self,
        samples: Samples,
        micros: Micros,
        make_loss: Callable[[Micros], LossT],
        *,
        may_repeat: bool = True,
    ) -> Passes[LossT]:
        """Adds the gradients of micro-batches; each micro-batch has one backward pass."""
        loss_of = make_loss(micros)
        passes = Passes(loss_of, micros, torch.zeros((), device=self.device), Work())
        for micro in filter(None, micros):
            found = [self._sequence(samples, position, self._temperature) for position in micro]
            scores = torch.cat([scores for scores, _ in found])
            entropies = [entropy for _, entropy in found if entropy is not None]
            entropy = torch.cat(entropies) if entropies else None
            loss = loss_of(samples.select(micro), scores, entropy)
            loss.backward()
            passes.loss += loss.detach()
            for position in micro:
                responses = int(samples.responses.lengths[position])
                length = int(samples.prompts.lengths[position]) + responses
                passes.work += Work(length, length, float(length) ** 2, responses)
        return passes

    def _sequence(
        self, samples: Samples, position: int, temperature: float
    ) -> tuple[Tensor, Tensor | None]:
        """Returns scores and, of a policy, entropies ``[r]`` of one sequence's response tokens."""
        prompt = samples.prompts.select([position]).values.to(self.device, torch.int64)
        response = samples.responses.select([position]).values.to(self.device, torch.int64)
        tokens = torch.cat([prompt, response])[None]
        model: Any = self.module.model
        given = samples.inputs[position : position + 1]
        arguments = {"use_cache": False, **model_arguments(model.get_decoder(), given, self.device)}
        # The state before a token predicts it.
        predictors = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        if self.module.head is not None:
            states = model.get_decoder()(input_ids=tokens, **arguments).last_hidden_state
            values: Tensor = self.module.head(states[0, predictors]).squeeze(-1)
            return values.float(), None
        logits = model(input_ids=tokens, **arguments).logits[0, predictors].float()
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, response[:, None]).squeeze(1), entropy

    def optimizer_step(
        self, learning_rate: float | None, *, scale: Tensor | None = None
    ) -> OptimizerStep:
        """Clips the accumulated gradients, updates the weights with them, and drops them."""
        grad_norm, moved = math.nan, False
        if learning_rate is not None:
            parameters = [each for each in self.module.parameters() if each.grad is not None]
            for parameter in parameters:
                if scale is not None and parameter.grad is not None:
                    parameter.grad *= scale
            grad_norm = float(nn.utils.clip_grad_norm_(parameters, self._max_grad_norm))
            moved = learning_rate > 0 and math.isfinite(grad_norm)
        if moved:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad()
        return OptimizerStep(grad_norm, moved=moved)

    def export_weights(self, *, rows: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields the live weights."""
        for name, value in stored_tensors(self.module.model).items():
            yield name, value.detach()

    def save(self) -> PendingSave:
        """Copies weights and optimizer state to host memory."""
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
        found: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            found |= load_file(file)
        for name, value in self._state().items():
            if name not in found or found[name].shape != value.shape:
                raise DataLossError(
                    f"{folder} has no tensor {name} of the shape {list(value.shape)}; resume from a "
                    "checkpoint of the same model that one trainer process wrote",
                    folder=folder,
                )
            value.copy_(found[name])
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
