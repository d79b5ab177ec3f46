"""The trained model: policy, critic, attention, adapters, optimizer, and how they are spread."""
