"""Weights of a model that get a LoRA adapter, by their names and shapes."""

from typing import Final

WITHOUT_ADAPTERS: Final = (".mamba.out_proj", ".conv1d")
"""Ends of the names of modules whose weights kernels use directly, so that they would ignore an adapter."""
