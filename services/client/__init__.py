"""The Python client: a distribution of its own, and the program that writes most of it."""
