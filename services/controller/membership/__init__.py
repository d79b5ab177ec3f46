"""Registered workers, and the rendezvous of their ranks."""
