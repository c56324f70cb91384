"""The nodes: who is there, how they are, and the streams to them."""
