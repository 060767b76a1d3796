"""A member of a consumer group whose input, rows and messages are written together or not at all.

What belongs here: the loop around a user's handler, and what its threads share. May use: ``dualwrite.writing`` and everything
below it.
"""
