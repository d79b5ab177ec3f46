"""Models and tokenizers, as trainer and rollouts both load them."""
