"""Telemetry: logs, metrics, traces."""
