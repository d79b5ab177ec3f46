"""Episode shapes: what happens between a prompt and a scored sample."""
