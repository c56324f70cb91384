"""Pair streams, one gRPC stream between the frontends of two nodes: dialer, service and codec."""
