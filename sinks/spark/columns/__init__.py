"""Which column goes where, and the DataFrame as values to send.

What belongs here: anything that is known from names and types, and turning Arrow columns and rows into values.
May use: ``options`` and ``schemas``.
"""
