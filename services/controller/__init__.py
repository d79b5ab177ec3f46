"""The control plane: runs, prompts, staleness, weight-sync sessions; never tensors."""
