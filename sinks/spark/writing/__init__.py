"""Both legs of a partition in one pass: COPY and messages.

What belongs here: what moves rows, whichever way the batch is decided.
May use: ``formats``, ``columns`` and ``options``.
"""
