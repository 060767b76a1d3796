"""The state machines as transition tables, their interpreter, and the diagrams drawn from them.

What belongs here: tables from (state, event) to the next state. May use: nothing else of the protocol.
"""
