"""The run specification: what is trained, by which algorithm, on which data."""
