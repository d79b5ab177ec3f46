"""Life of a run from admission to end: driver, recovery, elastic sizing."""
