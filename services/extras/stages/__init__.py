"""Training engine with pipeline stages: each process holds consecutive layers of the model."""
