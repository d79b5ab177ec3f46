"""Batches from the transferqueue as packed micro-batches, and the attention over them."""
