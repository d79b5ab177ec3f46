"""Training engines: each implements the protocol that the trainer's steps and ranks use."""
