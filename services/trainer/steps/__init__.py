"""Training steps of the policy and the critic, their gradients and metrics, and scoring of stored samples."""
