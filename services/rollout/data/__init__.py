"""Prompt sources, prompts, demonstrations and the curriculum."""
