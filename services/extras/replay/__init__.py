"""Records of runs: what each step depended on, to replay the trainer bit by bit."""
