"""What an engine needs that writes one batch by many participants, whichever engine it is.

What belongs here: recipes over many transactions at once. May use: the ports, the protocol and ``dualwrite.recovery``.
"""
