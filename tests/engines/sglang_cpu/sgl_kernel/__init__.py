"""Stand-in for sgl_kernel."""

import torch
from stand_in import stand_in

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)


class _Runtime:
    """Fake CUDA runtime without effect: SGLang pins the memory of the chosen experts, also on a CPU."""

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
