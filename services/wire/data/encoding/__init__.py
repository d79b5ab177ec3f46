"""Encodings of the data plane: tensors as byte columns, checksums, and messages."""
