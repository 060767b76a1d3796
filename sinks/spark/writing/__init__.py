"""Both legs of a partition in one pass: rows and messages.

What belongs here: moving rows, however the batch is decided.
May use: ``formats``, ``databases``, ``columns`` and ``options``.
"""
