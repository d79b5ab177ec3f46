"""Workers of the roles logp and ref_logp, which compute logprobs of stored samples next to the trainer."""
