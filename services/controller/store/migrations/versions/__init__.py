"""One file a migration, in one line of succession."""
