"""Pure decision rules of a run: life cycle, group ledger, batches, scores."""
