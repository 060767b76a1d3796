"""Messages with a schema: Avro, JSON Schema, Protobuf; checked against the columns, registered, built.

What belongs here: one module for each format, and what all of them need.
May use: ``columns``, ``schemas`` and ``options``.
"""
