"""Extras: what only some runs use, each behind a door. The core imports none of them (README.md)."""
