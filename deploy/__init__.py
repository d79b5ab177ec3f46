"""What deploys Slipstream, and the generators of its documents."""
