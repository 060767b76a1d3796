"""Settling: asks what former owners have left in Kafka, looks back for lost decisions, and ends what is open.

What belongs here: recipes that run the decisions of ``dualwrite.protocol.settling`` over the ports. May use: the ports and the
protocol.
"""
