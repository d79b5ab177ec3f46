"""A run from its admission to its end: driver, recovery, changes of size."""
