"""Run management: admission, drivers, quotas, events, checkpoints and samples of all runs."""
