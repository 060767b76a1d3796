"""State stores in SQL databases: the rows of the protocol next to the user's own, over SQLAlchemy Core.

What belongs here: SQL, and the meaning of what a database answers. May use: the interfaces and the protocol; no other store.
"""
