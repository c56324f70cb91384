"""What requests need before their turn: a compiled guide, an adapter in a slot."""
