"""Environments: who gives an episode its prompt, tools, observations, end and reward."""
