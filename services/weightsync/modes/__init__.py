"""How weights travel: one file per value of ``weight_sync.mode``."""
