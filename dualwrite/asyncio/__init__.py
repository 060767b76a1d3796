"""The writer and the consumer for tasks of an event loop.

What belongs here: forms of the writer's and the consumer's classes for ``async`` code. Nothing here decides, settles or
ends a dual write by itself. May use: ``dualwrite.consumer``, ``dualwrite.writing`` and everything below it.
"""
