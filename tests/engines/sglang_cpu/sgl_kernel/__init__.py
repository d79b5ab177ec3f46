"""Stand-in for sgl_kernel."""

from stand_in import stand_in

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)
