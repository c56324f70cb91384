"""How long who waits has to wait."""
