"""The data path that works everywhere: sockets of our own."""
