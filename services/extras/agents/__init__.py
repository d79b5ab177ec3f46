"""OpenAI-compatible endpoint in front of the engine, which records what agents sample."""
