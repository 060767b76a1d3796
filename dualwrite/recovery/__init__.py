"""Finishes transactions that a process left open: claim, inspect, settle, report. Also the calls for operators and start-up.

What belongs here: recipes that end transactions of other processes, or of this one after a failure. May use: the interfaces
and the protocol; ``servers`` and the calls for people create the adapters, so they may use ``dualwrite.kafka`` and
``dualwrite.stores``, too.
"""
