"""Lists, inspects and ends transactions without their producers, and proves outcomes from the log. Over kafka-python.

What belongs here: requests, their routing, and the meaning of their answers. May use: the configuration, the ports and
the protocol.
"""
