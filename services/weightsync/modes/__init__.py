"""Transfer modes: one file per value of ``weight_sync.mode``."""
