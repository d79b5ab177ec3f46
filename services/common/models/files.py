"""One small file of a model: in its folder, or fetched by its Hugging Face id."""

from pathlib import Path

from services.common.spec.model import ModelSpec


def find_file(model: ModelSpec, name: str) -> Path | None:
    """Where a file of ``model.path`` lies; None if the model has none of that name.

    Raises:
        OSError: If it is to be fetched and cannot be.
    """
    if Path(model.path).is_dir():
        path = Path(model.path) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model.path, name, revision=model.revision))
    except LocalEntryNotFoundError:
        raise  # nobody could be asked, so nothing is known
    except EntryNotFoundError:
        return None
