"""A node's frontend process: its gRPC server and streams, and the engine process that it starts."""
