"""Base weights of a server for adapters: read again from its model's folder, identified by a digest."""

from services.common.models.configs import full_config
from services.common.models.loading import find_folder, read_weights
from services.common.runspec.run import ModelSpec
from services.extras.external_engine.shared_tensors import open_shared
from services.extras.fleets.staging import SharedMemory, StagedWeights
from services.weightsync.adapters import frozen_digest, frozen_tensors

_BUCKET_BYTES = 256 << 20


class BaseCheckpoint:
    """Weights of a checkpoint in memory that the server's workers can open.

    Args:
        path: Folder or Hugging Face id, as the server has it.
        revision: Revision of the id.
        dtype: Name of the dtype in which the engine holds them.

    Attributes:
        digest: Hex digest that equals the one of a trainer's frozen weights only for equal weights.

    Raises:
        ValueError: If the weights cannot be read. Blocks.
    """

    def __init__(self, path: str, *, revision: str | None, dtype: str) -> None:
        model = ModelSpec(path=path, revision=revision)
        config = full_config(model)
        specs, buffers = frozen_tensors(config, dtype)
        self._staged = StagedWeights(0, specs, _BUCKET_BYTES)
        try:
            tensors = open_shared(self.description())
            read_weights(tensors, find_folder(model), config.to_dict())
            frozen = ((name, value) for name, value in tensors.items() if name not in buffers)
            self.digest = bytes(frozen_digest(frozen).tolist()).hex()
        except BaseException:
            self.close()
            raise

    def description(self) -> str:
        """Returns the description that the workers open."""
        return self._staged.description()

    @property
    def memory(self) -> SharedMemory:
        return self._staged.memory

    def close(self) -> None:
        """Frees the memory."""
        self._staged.memory.close()
