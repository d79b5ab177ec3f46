"""Built-in engine: continuous batching over transformers models."""
