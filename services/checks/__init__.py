"""Checks of everything that is known before a run starts. They import no service."""
