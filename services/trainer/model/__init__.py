"""The trained model: policy, critic, adapters, optimizer, and their distribution over processes."""
