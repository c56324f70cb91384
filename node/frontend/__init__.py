"""A node's front process: its gRPC server, its streams, and the engine process that it starts."""
