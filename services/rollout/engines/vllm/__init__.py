"""vLLM engine backend."""
