"""Durable state of a run: journal, requests, failures."""
