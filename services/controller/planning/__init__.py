"""What other GPUs, bounds on staleness and concurrency would do to a run: predicted from rates. Pure."""
