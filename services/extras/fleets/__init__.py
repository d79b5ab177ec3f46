"""Extra: engines in servers that somebody else starts, to which rollouts bring weights and verify them."""
