"""Both legs of a partition in one pass: COPY and messages.

What belongs here: moving rows, however the batch is decided.
May use: ``formats``, ``columns`` and ``options``.
"""
