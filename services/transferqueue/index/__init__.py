"""The index: which samples exist, where they are, and who uses them."""
