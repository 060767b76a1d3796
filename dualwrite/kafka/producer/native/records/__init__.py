"""The bytes of record batches (Kafka's message format v2), and the partition of a key.

What belongs here: pure functions over bytes and columns, without sockets, threads or a clock. May use: the errors, and the
libraries for compression and checksums. Arrow and numpy are imported by ``columns`` and what it is made of, nowhere else.
"""
