"""Control plane of runs: life cycle, dispatch, staleness and weight sessions. Handles no tensors."""
