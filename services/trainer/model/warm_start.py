"""Warm start: supervised training of a random preset into a base model, done once and cached.

The cache folder is named by the digest of everything that shapes the result: preset, tokenizer, examples
(including their source), recipe and seed.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from services.common.callables import load_callable, source_digest
from services.common.models.loading import (
    as_stored,
    find_folder,
    load_config,
    load_folder,
    load_model,
    stored_tensors,
)
from services.common.models.tokenizer import Tokenizer
from services.common.runspec.run import ModelSpec, WarmStartSpec
from services.trainer.batch.packing import pack
from services.trainer.model.policy import Policy
from services.wire.data.jagged import Jagged

Progress = Callable[[str], None]
"""Called with a description of what a process does while it loads its models."""

_BETAS = (0.9, 0.95)
_WARMUP_STEPS = 30
_FINAL_FRACTION = 0.1
_MAX_GRAD_NORM = 1.0
_REPORT_EVERY = 20
"""Steps between two reports of the warm start."""
_EXAMPLES_PER_DRAW = 64
"""Steps whose examples one call of the user's function draws."""


def load_base_model(
    model: ModelSpec,
    tokenizer: Tokenizer,
    *,
    seed: int,
    device: torch.device,
    cache: Path,
    progress: Progress,
) -> PreTrainedModel:
    """Loads the model that training starts from, in float32.

    Args:
        model: The model; a preset with a warm start is trained here unless the cache has it.
        seed: Seed of random weights and of the examples.
        device: Device that it is loaded to and trained on.
        progress: Called after each step of a warm start.

    Raises:
        ValueError: If the model does not load, or the examples are invalid.
    """
    if model.warm_start is None:
        return load_model(model, tokenizer, dtype=torch.float32, device=device, seed=seed)
    folder = base_folder(model, tokenizer, seed=seed, device=device, cache=cache, progress=progress)
    assert folder is not None
    return load_folder(folder, dtype=torch.float32, device=device)


def base_folder(
    model: ModelSpec,
    tokenizer: Tokenizer,
    *,
    seed: int,
    device: torch.device,
    cache: Path,
    progress: Progress,
) -> Path | None:
    """Returns the folder of the model that training starts from; None for a preset's random weights.

    Arguments and errors are those of :func:`load_base_model`.
    """
    if model.warm_start is None:
        return None if model.is_tiny else find_folder(model)
    folder = cache / _digest(model, tokenizer, seed)
    with _alone(folder):
        if not (folder / SAFE_WEIGHTS_NAME).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            base_model = load_model(model, tokenizer, dtype=torch.float32, device=device, seed=seed)
            attention = base_model.config._attn_implementation  # noqa: SLF001 -- its only name
            train(base_model, tokenizer, model.warm_start, seed=seed, progress=progress)
            base_model.set_attn_implementation(attention)
            _keep(base_model, tokenizer, folder)
    return folder


def train(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    spec: WarmStartSpec,
    *,
    seed: int,
    progress: Progress,
) -> None:
    """Trains on examples; the loss covers the response and the end token.

    Recipe: AdamW with betas 0.9 and 0.95, 30 steps of warm-up, cosine to 10 %, gradient norm 1.

    Raises:
        ValueError: If the examples are not pairs of non-empty texts.
    """
    policy = Policy(model, temperature=1.0)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=spec.learning_rate, betas=_BETAS, weight_decay=0.0, fused=True
    )
    examples: list[tuple[Tensor, Tensor]] = []
    for step in range(1, spec.steps + 1):
        if not examples:
            draw = step // _EXAMPLES_PER_DRAW
            examples = _draw(spec, tokenizer, seed=seed * 1_000_003 + draw)
        batch = [examples.pop() for _ in range(spec.batch_size)]
        packed = pack(
            Jagged.from_list([prompt for prompt, _ in batch]),
            Jagged.from_list([response for _, response in batch]),
            device=model.device,
        )
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * _schedule(step, spec.steps)
        logprobs, _ = policy(packed)
        (-logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _REPORT_EVERY == 0:
            progress(f"warm start: step {step} of {spec.steps}")


def _schedule(step: int, steps: int) -> float:
    if step <= _WARMUP_STEPS:
        return step / _WARMUP_STEPS
    progress = (step - _WARMUP_STEPS) / max(1, steps - _WARMUP_STEPS)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return _FINAL_FRACTION + (1.0 - _FINAL_FRACTION) * cosine


def _draw(spec: WarmStartSpec, tokenizer: Tokenizer, *, seed: int) -> list[tuple[Tensor, Tensor]]:
    count = spec.batch_size * _EXAMPLES_PER_DRAW
    function = load_callable(spec.examples)
    call = f"model.warm_start.examples {spec.examples!r}, called with ({count}, {seed}),"
    try:
        pairs: list[tuple[str, str]] = list(function(count, seed))
    except Exception as error:
        raise ValueError(f"{call} raised {type(error).__name__}: {error}") from error
    is_pairs = all(isinstance(pair, Sequence) and len(pair) == 2 and all(pair) for pair in pairs)
    if len(pairs) != count or not is_pairs:
        raise ValueError(
            f"{call} must return {count} pairs of non-empty prompt and response, but returned "
            f"{len(pairs)} items, first {pairs[0] if pairs else None!r}"
        )
    eos = [tokenizer.eos_id]
    return [
        (torch.tensor(tokenizer.encode(prompt)), torch.tensor(tokenizer.encode(response) + eos))
        for prompt, response in pairs
    ]


def _digest(model: ModelSpec, tokenizer: Tokenizer, seed: int) -> str:
    assert model.warm_start is not None
    described = {
        "recipe": 1,
        "config": load_config(model, tokenizer).to_json_string(use_diff=False),
        "tokenizer": model.tokenizer,
        "warm_start": model.warm_start.model_dump(exclude={"examples"}),
        "examples": source_digest(model.warm_start.examples),
        "function": model.warm_start.examples.rpartition(":")[2],
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process of this host at a time create a folder; later processes find the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _keep(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Publishes the folder atomically: a reader sees all of it or nothing.

    ``save_pretrained`` of transformers writes nothing on ranks above 0, which may be the only ones of a host.
    """
    model_tensors = {name: value.detach() for name, value in stored_tensors(model).items()}
    checkpoint_tensors = as_stored(model_tensors, model.config.to_dict())
    tensors = {name: value.contiguous() for name, value in checkpoint_tensors.items()}
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as temporary:
        unfinished = Path(temporary) / folder.name
        unfinished.mkdir()
        save_file(tensors, unfinished / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        model.config.save_pretrained(unfinished)
        tokenizer.save(unfinished)
        try:
            os.rename(unfinished, folder)  # noqa: PTH104 -- must fail, not replace, if another was faster
        except OSError:
            if not (folder / SAFE_WEIGHTS_NAME).is_file():
                raise
