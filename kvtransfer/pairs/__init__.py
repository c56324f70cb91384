"""Pair streams, one gRPC stream between the frontends of each two nodes: dialer, service and
codec.
"""
