"""What is done with a batch: steps of the policy and of the critic, their terms, and fields that join it."""
