"""Event bus, recorder, metrics, OpenTelemetry, health."""
