"""Stand-in for torchaudio."""

from stand_in import stand_in

__version__ = "2.11.0"
__getattr__ = stand_in(__name__)
