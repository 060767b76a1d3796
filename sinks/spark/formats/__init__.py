"""Messages with a schema (Avro, JSON Schema, Protobuf): checks them against the columns, registers schemas, serializes.

What belongs here: one module for each format, and code that all formats share.
May use: ``column_types``, ``schema_parts``, ``sendable``, ``layout``, ``registry``, ``digests`` and ``options``.
"""
