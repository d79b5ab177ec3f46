"""Protocols of agents: OpenAI's responses and Anthropic's messages."""
