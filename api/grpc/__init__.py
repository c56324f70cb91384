"""The router's gRPC service, `Router`."""
