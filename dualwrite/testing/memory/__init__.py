"""A writer without servers, for unit tests: the recipes of ``dualwrite.writing`` over a Kafka that is a list in memory.

What belongs here: stand-ins for the servers. The recipes, their refusals and their texts are the product's own. May use:
``dualwrite.writing`` and what is below it; at import no Kafka client.
"""
