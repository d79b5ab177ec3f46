"""Stand-in for sgl_kernel."""

import torch
from stand_in import stand_in

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)


class _Runtime:
    """Says that memory is pinned for a GPU: SGLang pins where it keeps the chosen experts, on a CPU too."""

    @staticmethod
    def cudaHostRegister(*_: int) -> int:
        """Does nothing."""
        return 0

    @staticmethod
    def cudaHostUnregister(*_: int) -> int:
        """Does nothing."""
        return 0


if not torch.cuda.is_available():
    torch.cuda.cudart = _Runtime
