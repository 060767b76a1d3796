"""How transactions end: decisions about what was decided, what is open, and what the database or a broker has forgotten.

What belongs here: the next step in settling, knowing an end, looking back, resolving a doubt. May use: the protocol's values.
"""
