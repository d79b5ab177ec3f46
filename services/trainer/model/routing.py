"""Routing of a trained mixture of experts: counts, balances and replays the routers' choices.

Engine and trainer choose different experts for a few per cent of tokens, whose probabilities then differ
widely. Replayed choices (R3, arXiv:2510.11370) are those of the engine, with weights gathered from the
trainer's own logits, so that gradients still reach the router.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.common.models.experts import routers_of
from services.common.models.families import FAMILIES, num_experts
from services.trainer.batch.context import ContextRanks
from services.trainer.batch.packing import PackedTokens

_BIAS = "e_score_correction_bias"
_LEAST_SUM = 1e-20


class Routing:
    """Observes and controls the routers of a policy in the first forward pass since :meth:`begin`.

    Args:
        model: Model whose routers are hooked.
        config: Configuration of the model, as a dictionary.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        self._kind = FAMILIES[str(config["model_type"])].routing
        self._num_experts = num_experts(config)
        self._replayed: Tensor | None = None
        self._context: ContextRanks | None = None
        self._num_tokens = 0
        self._uses: Tensor | None = None
        self._is_replaying = False
        self._logits: dict[int, Tensor] = {}
        self._chosen: dict[int, Tensor] = {}
        self._differs: dict[int, Tensor] = {}
        self._routers = list(routers_of(model))
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._route, layer))

    @property
    def num_layers(self) -> int:
        """Number of layers with experts."""
        return len(self._routers)

    def begin(self, packed: PackedTokens, replay: str) -> None:
        """Prepares a forward pass; stays valid until its backward pass, which may recompute it, has ended.

        Args:
            packed: The tokens, or this rank's tokens if ranks compute them together.
            replay: Use of the engine's choices: value of ``rollout.routing_replay``.
        """
        self._replayed = None if replay == "off" else packed.experts
        self._is_replaying = replay == "replay"
        self._context, self._num_tokens = packed.context, len(packed.layout.depths)
        self._uses = packed.uses
        self._logits, self._chosen, self._differs = {}, {}, {}

    def counts(self) -> Tensor:
        """Returns ``[layers, E]`` int64: how often each expert was chosen for tokens of this rank.

        A token that sequences share counts as often as it would without sharing.
        """
        num_local = self._num_local
        experts = torch.stack([self._chosen[layer][:num_local] for layer in sorted(self._chosen)])
        times = torch.ones_like(experts)
        if self._uses is not None:
            times *= self._uses[:num_local, None]
        counts = experts.new_zeros(len(experts), self._num_experts)
        return counts.scatter_add_(1, experts.flatten(1), times.flatten(1))

    def differences(self) -> tuple[Tensor, Tensor] | None:
        """Returns the tokens for which a layer and the engine differ, and those with known experts.

        Both are ``[T]`` bool.
        """
        if self._replayed is None:
            return None
        is_replayed = (self._replayed >= 0).flatten(1).any(1)
        differs = torch.stack(list(self._differs.values())).any(0)
        if self._context is not None:
            differs = self._context.whole(differs, self._num_tokens)
            is_replayed = self._context.whole(is_replayed, self._num_tokens)
        return differs, is_replayed

    def balance_loss(self) -> Tensor:
        """Auxiliary loss of the Switch Transformer (arXiv:2101.03961, equations 4 to 6) over all layers.

        Scaled as ``router_aux_loss_coef`` of a ``config.json`` expects it: the number of chosen experts if
        all are chosen equally often. If each expert has its own sigmoid score, probabilities are shares of
        their sum (arXiv:2412.19437, equation 18).
        """
        size = self._num_local
        logits = torch.cat([self._logits[layer][:size] for layer in sorted(self._logits)]).float()
        if self._kind == "sigmoid":
            scores = logits.sigmoid()
            probabilities = scores / (scores.sum(1, keepdim=True) + _LEAST_SUM)
        else:
            probabilities = logits.softmax(1)
        choices, probability = self.counts().sum(0).float(), probabilities.sum(0)
        if self._context is not None:
            choices, probability = self._context.summed(
                torch.stack([choices, probability])
            ).unbind()
        num_choices = len(self._logits) * self._num_tokens
        return self._num_experts * (choices / num_choices * probability / num_choices).sum()

    @property
    def _num_local(self) -> int:
        """Number of this rank's tokens without the padding of its chunk."""
        if self._context is None:
            return self._num_tokens
        return self._context.num_local(self._num_tokens)

    @torch.no_grad()
    def move_biases(self, counts: Tensor, rate: float) -> None:
        """Raises the biases of experts chosen less often than the mean, lowers the others (arXiv:2408.15664).

        Args:
            counts: ``[layers, E]``, over all ranks.
        """
        for router, choices in zip(self._routers, counts.double(), strict=True):
            bias: Tensor = router.get_buffer(_BIAS)
            bias += rate * torch.sign(choices.mean() - choices).to(bias)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _route(
        self, layer: int, router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = output
        if self._replayed is not None:
            replay = self._replayed[:, layer]
            is_replayed = (replay >= 0).all(1, keepdim=True)
            differs = (replay.sort(1).values != experts.sort(1).values).any(1, keepdim=True)
            self._differs[layer] = (is_replayed & differs).squeeze(1)
            if self._is_replaying:
                experts = torch.where(is_replayed, replay, experts)
                weights = torch.where(
                    is_replayed, self._weights(router, logits, experts).to(weights), weights
                )
        # A recomputed layer routes again in the backward pass. Its logits would keep its graph, and with
        # it the activations of the layer's attention, until the next pass.
        if layer not in self._chosen:
            self._logits[layer], self._chosen[layer] = logits, experts
        return logits, weights, experts

    def _weights(self, router: Any, logits: Tensor, expert_ids: Tensor) -> Tensor:
        """Returns the ``[T, K]`` weights that the router gives to chosen experts."""
        if self._kind == "softmax_of_chosen":
            return logits.gather(1, expert_ids).softmax(1)
        if self._kind == "sigmoid":
            weights = logits.sigmoid().gather(1, expert_ids)
        else:
            weights = functional.softmax(logits, 1, dtype=torch.float32).gather(1, expert_ids)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / (weights.sum(1, keepdim=True) + _LEAST_SUM)
        return weights * getattr(router, "routed_scaling_factor", 1.0)
