"""Export of spans to an OpenTelemetry collector."""
