"""Transferqueue: stores samples between rollouts and trainer."""
