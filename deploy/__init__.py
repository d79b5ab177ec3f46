"""Deployment of Slipstream, and the generators of its documents."""
