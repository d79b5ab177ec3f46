"""The built-in engine: continuous batching over transformers models."""
