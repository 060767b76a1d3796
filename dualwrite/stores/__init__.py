"""State stores: the rows of the protocol in the user's own database."""
