"""The slipstream command: start services on this machine, submit, follow, summarise."""
