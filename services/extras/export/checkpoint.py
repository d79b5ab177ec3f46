"""Exports a checkpoint as a Hugging Face folder that loads elsewhere.

python -m services.extras.export.checkpoint CHECKPOINT SPEC FOLDER
"""

import argparse
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from services.common.models.configs import find_file
from services.common.models.families import image_kind
from services.common.models.loading import (
    SCORES_BEFORE_END,
    as_stored,
    build_model,
    find_folder,
    load_config,
    load_model,
    stored_tensors,
)
from services.common.models.tokenizer import load_tokenizer
from services.common.models.vision import checkpoint_config
from services.common.models.weight_files import stored_names
from services.common.runspec.loader import load_spec
from services.common.runspec.run import RunSpec
from services.trainer.checkpoint import manifest
from services.trainer.engines.fsdp.lora import add_adapters, merged_parameters
from services.trainer.model.policy import freeze_tower
from services.trainer.model.quantized import quantize_base

_PREFIX = "model."
"""Prefix of the weights' names in a checkpoint."""


def export_checkpoint(checkpoint: Path, spec: RunSpec, folder: Path) -> None:
    """Writes weights (adapters merged), configuration and tokenizer; a reward model as a classifier.

    If the source model has more weights than the trained one, as multimodal models do, all are written.

    Args:
        checkpoint: A published checkpoint.
        folder: Output folder; created if it does not exist.

    Raises:
        DataLossError: If the checkpoint is damaged.
        ValueError: If the model's configuration or tokenizer does not load.
    """
    manifest.verify(checkpoint)
    tokenizer = load_tokenizer(spec.model)
    config = load_config(spec.model, tokenizer)
    dtype = getattr(torch, spec.trainer.dtype)
    lora = spec.trainer.lora
    has_frozen = lora is not None or (spec.model.images and spec.trainer.freeze_vision_tower)
    if not has_frozen or spec.model.is_tiny:
        trained = build_model(config, dtype=torch.float32, device="cpu")
    else:
        # The checkpoint holds trained tensors only.
        trained = load_model(
            spec.model, tokenizer, dtype=torch.float32 if lora is None else dtype, device="cpu"
        )
        freeze_tower(trained, is_frozen=spec.trainer.freeze_vision_tower)
    if lora is not None:
        add_adapters(trained, lora)
        if lora.base_dtype is not None:
            quantize_base(trained, lora.base_dtype, dtype=dtype)
    tensors = stored_tensors(trained)
    if not spec.model.is_tiny:
        frozen = {
            name for name, parameter in trained.named_parameters() if not parameter.requires_grad
        }
        tensors = {name: value for name, value in tensors.items() if name not in frozen}
    load_shards(
        {_PREFIX + name: value.detach() for name, value in tensors.items()},
        storage_reader=HuggingFaceStorageReader(str(checkpoint)),
        no_dist=True,
    )
    source = None if spec.model.is_tiny else find_folder(spec.model)
    merged = dict(merged_parameters(trained))
    if spec.algorithm.loss_kind.trains_values:
        setattr(config, SCORES_BEFORE_END, "chat" if spec.data.chat_template else "text")
        _classifier(trained, checkpoint, config).to(dtype).save_pretrained(folder)
    elif source is None or not _replace(merged, config, source, folder):
        exported = build_model(config, dtype=dtype, device="cpu")
        exported.load_state_dict(merged, strict=False)
        exported.save_pretrained(folder)
        if spec.model.images:
            checkpoint_config(config).save_pretrained(folder)
    # The generation configuration may list more end tokens than config.json.
    if source is not None and (file := find_file(spec.model, GENERATION_CONFIG_NAME)):
        shutil.copyfile(file, folder / GENERATION_CONFIG_NAME)
    tokenizer.save(folder)


def _replace(
    tensors: Mapping[str, Tensor], config: PretrainedConfig, source: Path, folder: Path
) -> bool:
    """Writes a copy of the source with the given weights, if it is more than the trained language model.

    All other tensors, such as heads for multi-token prediction, are kept bit for bit. The given weights get
    the dtype that they have in the source.

    Returns:
        False if the source has no other tensors and takes no images; nothing is written then.
    """
    names = stored_names(source)
    new_tensors = as_stored(tensors, config.to_dict(), expected_names=names)
    if config.tie_word_embeddings:
        embedding = next(
            new_tensors[name] for name in new_tensors if name.endswith("embed_tokens.weight")
        )
        new_tensors |= {name: embedding for name in names if name.endswith("lm_head.weight")}
    if not names - new_tensors.keys() and image_kind(config.to_dict()) is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                old_tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no dict
            replaced = {
                name: new_tensors[name].to(value.dtype).contiguous()
                if name in new_tensors
                else value
                for name, value in old_tensors.items()
            }
            save_file(replaced, folder / path.name, metadata={"format": "pt"})
        elif path.suffix == ".json":
            shutil.copyfile(path, folder / path.name)
    return True


def _classifier(
    trained: PreTrainedModel, checkpoint: Path, config: PretrainedConfig
) -> PreTrainedModel:
    """Returns a reward model as a Hugging Face sequence classifier with one output."""
    head = torch.zeros(1, config.hidden_size)
    load_shards(
        {"head.weight": head},
        storage_reader=HuggingFaceStorageReader(str(checkpoint)),
        no_dist=True,
    )
    config = deepcopy(config)
    config.num_labels = 1
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(  # type: ignore[no-untyped-call]
        config
    )
    weights = {**trained.state_dict(), "score.weight": head}
    missing_weights, _ = model.load_state_dict(weights, strict=False)
    if missing_weights:
        raise ValueError(
            f"the sequence classifier of model_type {config.model_type!r} has "
            f"{', '.join(missing_weights[:4])}, which the trained model lacks; train a reward "
            "model of another family"
        )
    return model


def main() -> None:
    """Runs ``python -m services.extras.export.checkpoint``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder such as checkpoints/step-00000050")
    parser.add_argument("spec", type=Path, help="the run's specification")
    parser.add_argument("folder", type=Path, help="folder to write")
    arguments = parser.parse_args()
    export_checkpoint(arguments.checkpoint, load_spec(arguments.spec), arguments.folder)


if __name__ == "__main__":
    main()
