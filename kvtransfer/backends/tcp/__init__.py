"""The data path that works everywhere, over Baton's own sockets."""
