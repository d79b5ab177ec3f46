"""One run: its loop, its ledger, its staleness rule, its validation, its checkpoints."""
