"""Index of the transferqueue: metadata of samples, their locations, and leases of consumers."""
