"""The fault matrix: every request of the protocol, lost, late, repeated and cut, at every stage of a decision."""
