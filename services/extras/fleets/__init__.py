"""Extra: engines in servers that run separately, to which rollouts bring weights and verify them."""
