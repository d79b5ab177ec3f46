"""Clients of the services and the types that cross process borders; services meet only here."""
