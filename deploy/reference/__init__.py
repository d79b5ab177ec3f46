"""Generators of the references in docs/ and of most of the Python client."""
