"""Features that only some runs use, each behind a door; the core imports none of them (README.md)."""
