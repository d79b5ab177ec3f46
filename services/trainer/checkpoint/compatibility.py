"""Facts about a checkpoint's model, against which a run that starts from the checkpoint is checked.

A checkpoint of another model would fail with a missing tensor, or train on tokens with another meaning.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final

from services.common.models.tokenizer import Tokenizer
from services.common.runspec.run import RunSpec

CRITIC: Final = "critic"
"""Subfolder of the critic: in the policy's checkpoint, or beside all of them if it has its own processes."""
_SIZES: Final = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "tie_word_embeddings",
)
"""Keys of a ``config.json`` that determine the names and shapes of the weights."""


def model_facts(spec: RunSpec, config: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns JSON that describes the trained model and its optimizer's state."""
    sizes = config.get_text_config().to_dict()
    tokens = json.dumps(sorted(tokenizer.vocabulary.items())).encode()
    lora = spec.trainer.lora
    facts = {
        "sizes": {key: sizes[key] for key in _SIZES if sizes.get(key) is not None},
        "tokens": hashlib.sha256(tokens).hexdigest(),
        "lora": None,
        # The state of another optimizer, or of other tensors, cannot be loaded.
        "optimizer": spec.trainer.optimizer.kind,
        "loss": "values" if spec.algorithm.loss_kind.trains_values else "tokens",
        "vision": spec.model.images and not spec.trainer.freeze_vision_tower,
    }
    if lora is not None:
        # These import torch, which a run without adapters does not need here.
        from services.common.memory.sizes import shapes_of
        from services.common.models.adapters import target_modules

        facts["lora"] = {
            "rank": lora.rank,
            "alpha": lora.alpha,
            "target_modules": sorted(target_modules(shapes_of(config), lora)),
            # The frozen weights are not in the checkpoint. A copy of the model has another parent folder.
            "base": PurePath(spec.model.path).name,
            "revision": spec.model.revision,
            "base_dtype": lora.base_dtype,
        }
    return facts


def mismatches(
    facts: Mapping[str, Any], model: Mapping[str, Any] | None, *, parts: Collection[str]
) -> Iterator[str]:
    """Yields the differences that prevent a run from using a checkpoint, each with the key to change.

    Args:
        model: Result of :func:`model_facts` for the run; None if the models are known to be equal.
        parts: Subfolders that the run loads.
    """
    if any(counter(folder) not in facts for folder in parts):
        yield (
            "algorithm.advantage: this run trains a critic, but the checkpoint has none; use the "
            "algorithm.advantage of the checkpoint's run, or a checkpoint of a run with a critic"
        )
    saved = facts.get("model")
    if saved is None or model is None:
        return
    sizes = {
        key: value for key, value in model["sizes"].items() if saved["sizes"].get(key) != value
    }
    if sizes:
        checkpoint_sizes = _listed({key: saved["sizes"].get(key) for key in sizes})
        yield (
            f"model.path: the checkpoint's model has {checkpoint_sizes}, but this run's model has "
            f"{_listed(sizes)}; set model.path and model.tokenizer to those of the checkpoint's run"
        )
    elif saved["tokens"] != model["tokens"]:
        yield (
            "model.tokenizer: the checkpoint was trained with another vocabulary; set model.tokenizer to the "
            "tokenizer of the checkpoint's run"
        )
    # Checkpoints of earlier releases lack some facts about the adapters, and the facts compared below.
    if not _are_equal(saved["lora"], model["lora"]):
        yield (
            f"trainer.lora: the checkpoint has {_adapters(saved['lora'])}, but this run trains "
            f"{_adapters(model['lora'])}; set trainer.lora, model.path and model.revision to those "
            "of the checkpoint's run, or export it (python -m services.extras.export.checkpoint) and set "
            "model.path to the folder"
        )
    if saved.get("optimizer", model["optimizer"]) != model["optimizer"]:
        yield (
            f"trainer.optimizer.kind: the checkpoint has the state of {saved['optimizer']!r}, but this "
            f"run's optimizer is {model['optimizer']!r}; set it to that of the checkpoint's run"
        )
    if saved.get("loss", model["loss"]) != model["loss"]:
        yield (
            f"algorithm.loss: the checkpoint's model has a head for {saved['loss']}, but this run's model "
            f"has one for {model['loss']}; start a reward model only from one, and a policy only from a "
            "policy"
        )
    if saved.get("vision", model["vision"]) != model["vision"]:
        yield (
            "trainer.freeze_vision_tower: the checkpoint's run "
            f"{'trained' if saved['vision'] else 'did not train'} a vision tower; set model.images and "
            "trainer.freeze_vision_tower to those of the checkpoint's run"
        )


class OtherCheckpointError(ValueError):
    """The checkpoint is not one of this run's models and optimizers."""

    reason = "OtherCheckpoint"


def critic_folder(folder: str) -> str:
    """Returns the path or URL of the checkpoint of a critic with its own processes.

    Args:
        folder: Path or URL of the policy's checkpoint.
    """
    parent, _, name = folder.rpartition("/")
    return f"{parent}/{CRITIC}/{name}" if parent else f"{CRITIC}/{name}"


def counter(folder: str) -> str:
    """Returns the name of the fact that counts the updates of the engine with a subfolder."""
    return f"{folder}.num_updates" if folder else "num_updates"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _are_equal(saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> bool:
    """Returns True if the run's adapters have all saved facts, or if neither side has adapters."""
    if saved is None or current is None:
        return saved is current
    return {**current, **saved} == current


def _adapters(lora: Mapping[str, Any] | None) -> str:
    if lora is None:
        return "all weights (no adapters)"
    modules = ", ".join(lora["target_modules"])
    revision, dtype = lora.get("revision"), lora.get("base_dtype")
    base = f"{lora['base']}{f' at {revision}' if revision else ''}{f' in {dtype}' if dtype else ''}"
    return f"adapters of {base} (rank {lora['rank']}, alpha {lora['alpha']:g}, modules {modules})"
