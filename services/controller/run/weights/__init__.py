"""Weight sessions of a run: members, transfers, adoption."""
