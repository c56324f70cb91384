"""What every Baton program shares; the engine itself is in engine."""
