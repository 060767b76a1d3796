"""Relays of others, in processes of their own, for ``benchmarks.outbox`` to be measured beside."""
