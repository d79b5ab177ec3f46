"""Tensors to columns of bytes and back."""
