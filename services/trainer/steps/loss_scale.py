"""Dynamic loss scaling of float16 training, with the rules of ``torch.amp.GradScaler``.

Gradients below 6e-8 are 0 in float16, and those above 65,504 are infinite. The loss is multiplied by a scale
before the backward pass, and the float32 gradients are divided by it before they are clipped. The norm over
all ranks, by which gradients are clipped, also shows an overflow on any rank. ``GradScaler`` would check all
gradients once more, and leaves the skipping to fused kernels that Muon and offloaded moments do not have.
"""

from collections.abc import Mapping
from typing import Final

from services.common.runspec.trainer import LossScaleSpec
from services.trainer.batch.guard import NotFiniteError

_FACTOR: Final = 2.0
_MIN: Final = 1.0


class LossScale:
    """Scale of the loss, and updates since it changed; the same on all ranks."""

    def __init__(self, spec: LossScaleSpec) -> None:
        self.value = spec.initial
        self._growth_interval = spec.growth_interval
        self._num_updates = 0

    def grow(self) -> None:
        """Counts an update without overflow."""
        self._num_updates += 1
        if self._num_updates == self._growth_interval:
            self.value, self._num_updates = self.value * _FACTOR, 0

    def back_off(self) -> None:
        """Lowers the scale after an overflow.

        Raises:
            NotFiniteError: If the scale would fall below 1.
        """
        if self.value / _FACTOR < _MIN:
            raise NotFiniteError(
                f"gradients overflow in float16 even at loss scale {self.value:g}, to which overflows have "
                "lowered it; set trainer.dtype to bfloat16, or lower "
                "trainer.optimizer.learning_rate"
            )
        self.value, self._num_updates = self.value / _FACTOR, 0

    def facts(self, part: str) -> dict[str, float]:
        """Returns the state for a checkpoint, with the names for an engine's subfolder."""
        return dict(zip(_names(part), (self.value, self._num_updates), strict=True))

    def restore(self, facts: Mapping[str, float], part: str) -> None:
        """Restores the state of a checkpoint; one of a run with another dtype has none."""
        scale, updates = _names(part)
        if scale in facts:
            self.value, self._num_updates = float(facts[scale]), int(facts[updates])


def _names(part: str) -> tuple[str, str]:
    prefix = f"{part}." if part else ""
    return f"{prefix}loss_scale", f"{prefix}loss_scale_updates"
