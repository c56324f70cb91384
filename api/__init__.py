"""The router's client and operator APIs over gRPC and HTTP, and the status page."""
