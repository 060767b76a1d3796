"""Requests of a native producer to its coordinators: a producer id, the end of a transaction, consumed offsets.

What belongs here: requests to coordinators, and the meaning of their answers. May use: the connections and the rules of
the wire.
"""
