"""The state store of databases without SQL, over five primitives on keys and values: :class:`~.keys.Keys`.

What belongs here: the rules of the rows, once for all such databases. May use: the protocol and the ports; no driver.
"""
