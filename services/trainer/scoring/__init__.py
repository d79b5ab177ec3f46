"""Logprobs of stored samples, computed by workers beside the trainer: the roles logp and ref_logp."""
