"""One run: its loops, connections, weights, evaluations and checkpoints."""
