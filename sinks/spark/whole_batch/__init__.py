"""A batch that is decided at once: what each task prepares, and the decision on the driver.

What belongs here: the recipe of ``format("dualwrite")``.
May use: everything but ``per_partition``.
"""
