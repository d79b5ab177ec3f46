"""What a run decides by, as pure rules: its life, its ledger, its batches, its scores."""
