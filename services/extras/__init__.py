"""Features that only some runs use, each an entry of a door; the core imports none of them (README.md)."""
