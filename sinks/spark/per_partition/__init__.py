"""Batches whose partitions are decided one by one: the task's part and the driver's.

What belongs here: the recipe of ``write_batch`` and ``foreach_partition``.
May use: everything but ``whole_batch``.
"""
