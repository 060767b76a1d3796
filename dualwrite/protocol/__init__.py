"""The protocol as a pure core: tables and decisions, without I/O, clock or logging."""
