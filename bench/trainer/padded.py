"""The usual method, for comparison: padded batches through the Hugging Face model, all logits at once."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.trainer.workload import Scale
from services.common.runspec.trainer import OptimizerSpec
from services.trainer.batch.samples import Samples
from services.trainer.engines.fsdp import optim


class PaddedStep:
    """One optimizer step over padded micro-batches in the order of arrival."""

    def __init__(self, model: PreTrainedModel, scale: Scale, *, autocast: bool) -> None:
        self._model = model
        self._scale = scale
        self._autocast = autocast
        self._parameters = list(model.parameters())
        self._optimizer = optim.build_optimizer(model, OptimizerSpec())

    def run(self, samples: Samples) -> None:
        """Trains on all samples with a plain policy gradient."""
        device = self._model.device
        prompts, responses = samples.prompts.unbind(), samples.responses.unbind()
        for start in range(0, len(prompts), self._scale.padded_batch):
            stop = start + self._scale.padded_batch
            rows = [
                torch.cat(pair)
                for pair in zip(prompts[start:stop], responses[start:stop], strict=True)
            ]
            self._micro_batch(rows, [len(p) for p in prompts[start:stop]], device)
        norm = optim.gradient_norm(self._parameters)
        optim.clip_gradients(self._parameters, norm, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _micro_batch(self, rows: list[Tensor], prompts: list[int], device: torch.device) -> None:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        positions = torch.arange(ids.shape[1], device=device)
        attends = positions < lengths[:, None]
        trains = attends & (positions >= torch.tensor(prompts, device=device)[:, None])
        with torch.autocast(device.type, torch.bfloat16, enabled=self._autocast):
            logits = self._model(ids, attention_mask=attends.long(), use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1)
        chosen = logprobs.gather(2, ids[:, 1:, None]).squeeze(2)
        loss = -(chosen * trains[:, 1:]).sum() / trains.sum()
        loss.backward()  # type: ignore[no-untyped-call]
