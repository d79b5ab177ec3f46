"""Dashboards, alerts and the metrics reference, generated from one description."""
