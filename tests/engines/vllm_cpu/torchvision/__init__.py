"""Stand-in for torchvision."""

from stand_in import stand_in

__version__ = "0.28.0"
__getattr__ = stand_in(__name__)
