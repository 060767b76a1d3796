"""Messages brought into a transaction of the native engine: one by one, many, or from columns of Arrow.

What belongs here: what happens to a message before it is part of a record batch. May use: the rules of the wire and the
bytes of batches; no connection.
"""
