"""Workers: who has registered and lives, and where ranks meet."""
