"""Prompt sources, prompts, demonstrations, curriculum."""
