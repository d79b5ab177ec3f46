"""Trackers that receive a run's metrics: wandb, tensorboard, mlflow and trackio."""
