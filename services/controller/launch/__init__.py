"""Launchers: start, watch and stop the processes or pods of a run's workers."""
