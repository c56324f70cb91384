"""The router's gRPC service for clients."""
