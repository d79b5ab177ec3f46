"""Certificates, tokens, authorization, and limits on user code."""
