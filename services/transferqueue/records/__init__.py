"""Sample records: samples stored for people to read, beyond the life of their keys."""
