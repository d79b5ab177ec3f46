"""Starts, watches and stops the processes or pods of a run's workers."""
