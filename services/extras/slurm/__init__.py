"""Launcher ``slurm``: workers are steps of a Slurm allocation, on all of its nodes."""
