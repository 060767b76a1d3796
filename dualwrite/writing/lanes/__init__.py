"""Lanes: the claimed ids of one writer, each with its producer.

What belongs here: a lane's life, and the pool that gives lanes to blocks and settles them in between. May use: what
``dualwrite.writing`` may, but none of its other modules.
"""
