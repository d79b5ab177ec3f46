"""Object stores of clouds for checkpoints, models and data."""
