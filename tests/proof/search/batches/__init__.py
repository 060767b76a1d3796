"""Batches that one driver decides for several participants: every interleaving of the product's own recipes, within bounds.

The other configurations retell the recipes as steps. Here the recipes themselves run, ``dualwrite.sinks.batches`` above all,
as processes on the simulated broker and database, and are stopped before each request and each statement.
"""
