"""Workflow of turns with tools: Python functions and servers of the Model Context Protocol."""
