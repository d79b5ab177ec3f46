"""Exports a checkpoint as a Hugging Face folder that loads elsewhere.

python -m services.trainer.checkpoint.export CHECKPOINT SPEC FOLDER
"""

import argparse
from pathlib import Path

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from services.common.models.loading import (
    build_model,
    load_config,
    load_model,
    stored_tensors,
)
from services.common.models.tokenizer import load_tokenizer
from services.common.runspec.loader import load_spec
from services.common.runspec.run import RunSpec
from services.trainer.checkpoint import manifest
from services.trainer.engines.fsdp.lora import add_adapters, merged_parameters

_PREFIX = "model."
"""Prefix of the weights' names in a checkpoint."""


def export_checkpoint(checkpoint: Path, spec: RunSpec, folder: Path) -> None:
    """Writes weights (adapters merged), configuration and tokenizer.

    Args:
        checkpoint: A published checkpoint.
        spec: The run that wrote it.
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
    if lora is None or spec.model.is_tiny:
        trained = build_model(config, dtype=torch.float32, device="cpu")
    else:
        # The checkpoint holds trained tensors only.
        trained = load_model(spec.model, tokenizer, dtype=dtype, device="cpu")
    saved = stored_tensors(trained)
    if lora is not None:
        add_adapters(trained, lora)
        saved = stored_tensors(trained)
        if not spec.model.is_tiny:
            frozen = {name for name, each in trained.named_parameters() if not each.requires_grad}
            saved = {name: value for name, value in saved.items() if name not in frozen}
    load_shards(
        {_PREFIX + name: value.detach() for name, value in saved.items()},
        storage_reader=HuggingFaceStorageReader(str(checkpoint)),
        no_dist=True,
    )
    exported = build_model(config, dtype=dtype, device="cpu")
    exported.load_state_dict(dict(merged_parameters(trained)), strict=False)
    exported.save_pretrained(folder)
    tokenizer.save(folder)


def main() -> None:
    """Runs ``python -m services.trainer.checkpoint.export``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder such as checkpoints/step-00000050")
    parser.add_argument("spec", type=Path, help="the run's specification")
    parser.add_argument("folder", type=Path, help="folder to write")
    arguments = parser.parse_args()
    export_checkpoint(arguments.checkpoint, load_spec(arguments.spec), arguments.folder)


if __name__ == "__main__":
    main()
