"""The server process of a node (the frontend): its gRPC server and streams, and the engine process
that it starts.
"""
