"""Sinks: dual writes from data processing engines."""
