"""Security: certificates, tokens, authorization, and limits on user code."""
