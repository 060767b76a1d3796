"""The schema registry, and the parts of a message that have a schema.

What belongs here: the registry's client, and the values that ``formats`` and ``columns`` share.
May use: ``options``.
"""
