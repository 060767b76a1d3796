"""Batches that are decided as a whole: each task prepares its partition, the driver decides.

What belongs here: the recipe of ``format("dualwrite")``.
May use: everything but ``per_partition``.
"""
