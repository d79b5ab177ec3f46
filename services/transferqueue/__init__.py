"""The data plane: holds samples between rollouts and trainer."""
