"""The rules of the wire: which request comes next, and what its answer means.

What belongs here: sequences, batches in flight, retries, the meaning of every error code. Values in, values out.
May use nothing but the standard library's values and the bytes of batches: no sockets, no clock, no logging.
"""
