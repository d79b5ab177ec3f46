"""The trainer processes of a run: one leads, the others follow."""
