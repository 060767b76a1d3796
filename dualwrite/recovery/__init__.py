"""Finds out and finishes what a process left open: claim, inspect, settle, report; the calls for people and start-up hooks.

What belongs here: recipes that end transactions of others, or of this process after a failure. May use: the ports and the
protocol; ``recover``, ``forget`` and ``blocking``, which make the adapters themselves, also ``dualwrite.kafka`` and
``dualwrite.stores``.
"""
