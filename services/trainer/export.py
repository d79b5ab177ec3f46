"""A checkpoint as a Hugging Face folder that loads elsewhere.

python -m services.trainer.export CHECKPOINT SPEC FOLDER
"""

import argparse
from pathlib import Path

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from services.common.models.loading import build_model, load_config
from services.common.models.tokenizer import load_tokenizer
from services.common.spec.loader import load_spec
from services.common.spec.model import ModelSpec
from services.trainer import manifest
from services.trainer.checkpoint import MODEL_PREFIX


def export_checkpoint(
    checkpoint: Path, model: ModelSpec, folder: Path, *, dtype: torch.dtype
) -> None:
    """Write weights, configuration and tokenizer.

    Args:
        checkpoint: A published checkpoint.
        model: The model that was trained.
        folder: Where to; made if it does not exist.
        dtype: Of the written weights.

    Raises:
        DataLossError: If the checkpoint is damaged.
        ValueError: If the model's configuration or tokenizer does not load.
    """
    manifest.verify(checkpoint)
    tokenizer = load_tokenizer(model)
    built = build_model(load_config(model, tokenizer), dtype=torch.float32, device="cpu")
    load_shards(
        {MODEL_PREFIX + name: value.detach() for name, value in built.named_parameters()},
        storage_reader=HuggingFaceStorageReader(str(checkpoint)),
        no_dist=True,
    )
    built.to(dtype).save_pretrained(folder)  # type: ignore[arg-type]
    tokenizer.save(folder)


def main() -> None:
    """Entry point of ``python -m services.trainer.export``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder such as checkpoints/step-00000050")
    parser.add_argument("spec", type=Path, help="the run's specification")
    parser.add_argument("folder", type=Path, help="folder to write")
    arguments = parser.parse_args()
    spec = load_spec(arguments.spec)
    dtype = getattr(torch, spec.trainer.dtype)
    export_checkpoint(arguments.checkpoint, spec.model, arguments.folder, dtype=dtype)


if __name__ == "__main__":
    main()
