"""Environments, which give an episode its prompt, tools, observations, end and reward."""
