"""An OpenAI-compatible endpoint in front of the engine; what agents sample through it is recorded."""
