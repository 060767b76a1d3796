"""Every interleaving within small bounds: the product's own decisions, on the simulated broker and a simulated row."""
