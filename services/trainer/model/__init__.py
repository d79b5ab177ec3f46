"""The trained model: policy, critic, adapters, optimizer, and how they are spread."""
