"""A batch whose partitions are decided one by one: in the task, and on the driver.

What belongs here: the recipe of ``write_batch`` and ``foreach_partition``.
May use: everything but ``whole_batch``.
"""
