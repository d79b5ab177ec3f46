"""SGLang engine backend."""
